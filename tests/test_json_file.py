"""Reading a checkpoint's JSON files."""

from __future__ import annotations

from pathlib import Path

import pytest

from lily.errors import ConfigError
from lily.json_file import read_json_object, shown


def test_an_object_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": "é"}', encoding="utf-8")
    assert read_json_object(path) == {"a": "é"}


def test_no_file_is_none(tmp_path: Path) -> None:
    assert read_json_object(tmp_path / "a.json") is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1,\n "b"}', r"a\.json:2:5 is not JSON: Expecting ':' delimiter"),
        (b"", r"a\.json:1:1 is not JSON"),
        (b"[1]", r"a\.json holds \[1\]; it must be a JSON object"),
        (b"\xff{}", r"a\.json is not JSON: .*utf-8"),
        (b"[" * 100_000, r"a\.json is not JSON: "),
        (b'{"a": ' + b"9" * 5000 + b"}", r"a\.json is not JSON: .*digits"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_json_object(path)


def test_a_directory_in_the_files_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(ConfigError, match=r"a\.json can't be read"):
        read_json_object(tmp_path / "a.json")


def test_values_are_shown_in_one_short_line() -> None:
    assert shown(None) == "null"
    assert shown("é\n") == '"é\\n"'
    assert len(shown("x" * 1000)) == 60
    loop: list[object] = []
    loop.append(loop)
    assert shown(loop) == "list"
    assert shown({(1, 2): 3}) == "dict"
