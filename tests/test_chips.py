"""The chip table."""

from __future__ import annotations

import pytest

from lily.chips import CHIPS, find_chip, identify
from lily.errors import UsageError


@pytest.mark.parametrize(
    ("name", "numbers", "facts"),
    [
        ("m1", (13, "g", 8), ("M1, 8 GPU cores", 68, "Apple7")),
        ("m2pro-16", (14, "g", 16), ("M2 Pro, 16 GPU cores", 200, "Apple8")),
        ("m3max-30", (15, "s", 30), ("M3 Max, 30 GPU cores", 300, "Apple9")),
        ("m3ultra", (15, "d", 80), ("M3 Ultra, 80 GPU cores", 819, "Apple9")),
        ("m4max", (16, "s", 40), ("M4 Max, 40 GPU cores", 546, "Apple9")),
        ("m5max", (17, "s", 40), ("M5 Max, 40 GPU cores", 614, "Apple10")),
    ],
)
def test_facts(name: str, numbers: tuple[int, str, int], facts: tuple[str, int, str]) -> None:
    chip = find_chip(name)
    assert (chip.title, chip.bandwidth_gb_s, chip.metal_family) == facts
    generation, suffix, cores = numbers
    assert chip.identity == {"host": "metal", "generation": generation, "suffix": suffix, "gpu_cores": cores}
    assert identify(*numbers) is chip


def test_no_two_chips_are_the_same() -> None:
    assert len({(chip.generation, chip.suffix, chip.gpu_cores) for chip in CHIPS.values()}) == len(CHIPS) == 35


def test_names_as_people_write_them() -> None:
    assert find_chip("M5 Max") is CHIPS["m5max"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("m5mx", "unknown chip 'm5mx'; did you mean m5max?"),
        ("h200", f"unknown chip 'h200'; known: {', '.join(CHIPS)}"),
    ],
)
def test_unknown(name: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_chip(name)
    assert str(caught.value) == message


def test_not_in_the_table() -> None:
    assert identify(17, "s", 41) is None
