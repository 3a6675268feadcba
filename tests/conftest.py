"""What tests share: the distributions of this tree, and an account of skipped tests.

Skipped tests are counted and named, and in CI a skip that nobody foresaw fails the run.

Set ``CI=true`` for the latter. A test that did not run has shown nothing, so what may be skipped is written down here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.environments import Distributions

# No test is about time, and a shared or emulated machine is slow whenever it likes.
settings.register_profile("lily", deadline=None)
settings.load_profile("lily")

EXPECTED: Sequence[tuple[str, str]] = (
    # Reason, as a regular expression; why it can't be helped.
    (r"^Metal may be there$", "macOS: what is said on machines without Metal is shown on Linux"),
)


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """The sdist and wheel of this tree: those in ``LILY_WHEEL_DIR`` if it is set, else built now."""
    if folder := os.environ.get("LILY_WHEEL_DIR"):
        return Distributions.find(Path(folder).resolve())
    return Distributions.build(tmp_path_factory.mktemp("distributions"))


def skips(config: pytest.Config) -> list[tuple[str, str]]:
    """Test (or module) and reason of everything that was skipped."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    return [(report.nodeid, str(report.longrepr[2]).removeprefix("Skipped: ")) for report in reports]


def unforeseen(skipped: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those whose reason is on no list."""
    return [item for item in skipped if not any(re.search(pattern, item[1]) for pattern, _ in EXPECTED)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    passed = session.exitstatus == pytest.ExitCode.OK
    if os.environ.get("CI") == "true" and passed and unforeseen(skips(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    skipped = skips(config)
    if not skipped:
        return
    terminalreporter.section(f"{len(skipped)} skipped")
    for name, reason in skipped:
        terminalreporter.line(f"{name}: {reason}")
    surprises = unforeseen(skipped)
    if os.environ.get("CI") == "true" and surprises:
        terminalreporter.line(
            f"CI: {len(surprises)} of these are not among the skips that tests/conftest.py expects", red=True
        )
