"""Apple's GPUs as numbers: what tells one from another, and the memory bandwidth that bounds decoding.

Generation and suffix come from the device's architecture name: 13 to 17 are M1 to M5, ``g`` is the base and the
Pro chip, ``s`` Max, ``d`` Ultra; only the core count tells a Pro from a base chip.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from lily.errors import UsageError

__all__ = ["CHIPS", "Chip", "find_chip", "identify"]


@dataclass(frozen=True)
class Chip:
    """One chip as sold.

    Attributes:
        name: ``m5max``; with fewer GPU cores than the best of its kind, ``m5max-32``.
        title: for people, ``M5 Max, 40 GPU cores``.
        generation: number in the architecture name.
        suffix: letter in the architecture name.
        gpu_cores: cores.
        bandwidth_gb_s: nominal memory bandwidth, 10^9 bytes a second.
        metal_family: ``Apple7`` to ``Apple10``.
    """

    name: str
    title: str
    generation: int
    suffix: str
    gpu_cores: int
    bandwidth_gb_s: int
    metal_family: str

    @property
    def identity(self) -> Mapping[str, int | str]:
        """What a policy's ``match`` sees of a device with this chip."""
        return {
            "host": "metal",
            "generation": self.generation,
            "suffix": self.suffix,
            "gpu_cores": self.gpu_cores,
        }


# Generation, kind, (cores, GB/s) of each version, best first. Ultra: there is no M4, and no figures of an M5 yet.
_KINDS: tuple[tuple[int, str, tuple[tuple[int, int], ...]], ...] = (
    (13, "", ((8, 68),)),
    (13, "pro", ((16, 200), (14, 200))),
    (13, "max", ((32, 400), (24, 400))),
    (13, "ultra", ((64, 800), (48, 800))),
    (14, "", ((10, 100), (8, 100))),
    (14, "pro", ((19, 200), (16, 200))),
    (14, "max", ((38, 400), (30, 400))),
    (14, "ultra", ((76, 800), (60, 800))),
    (15, "", ((10, 100), (8, 100))),
    (15, "pro", ((18, 150), (14, 150))),
    (15, "max", ((40, 400), (30, 300))),
    (15, "ultra", ((80, 819), (60, 819))),
    (16, "", ((10, 120), (8, 120))),
    (16, "pro", ((20, 273), (16, 273))),
    (16, "max", ((40, 546), (32, 410))),
    (17, "", ((10, 153), (8, 153))),
    (17, "pro", ((20, 307), (16, 307))),
    (17, "max", ((40, 614), (32, 460))),
)
_SUFFIX = {"": "g", "pro": "g", "max": "s", "ultra": "d"}
_FAMILY = {13: "Apple7", 14: "Apple8", 15: "Apple9", 16: "Apple9", 17: "Apple10"}
_FIRST_GENERATION = 13


def _chip(generation: int, kind: str, cores: int, bandwidth: int, best: bool) -> Chip:
    number = generation - _FIRST_GENERATION + 1
    return Chip(
        name=f"m{number}{kind}" if best else f"m{number}{kind}-{cores}",
        title=f"M{number} {kind.title()}".rstrip() + f", {cores} GPU cores",
        generation=generation,
        suffix=_SUFFIX[kind],
        gpu_cores=cores,
        bandwidth_gb_s=bandwidth,
        metal_family=_FAMILY[generation],
    )


CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for generation, kind, versions in _KINDS
    for index, (cores, bandwidth) in enumerate(versions)
    for chip in [_chip(generation, kind, cores, bandwidth, best=index == 0)]
}


def find_chip(name: str) -> Chip:
    """The chip of that name.

    Raises:
        UsageError: there is none; the message names the nearest.
    """
    wanted = "".join(name.lower().split())
    chip = CHIPS.get(wanted)
    if chip is None:
        near = difflib.get_close_matches(wanted, CHIPS, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(CHIPS)}"
        raise UsageError(f"unknown chip {name!r}; {hint}")
    return chip


def identify(generation: int, suffix: str, gpu_cores: int) -> Chip | None:
    """The chip with these numbers, or None if it is not in the table."""
    wanted = (generation, suffix, gpu_cores)
    for chip in CHIPS.values():
        if (chip.generation, chip.suffix, chip.gpu_cores) == wanted:
            return chip
    return None
