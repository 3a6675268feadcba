"""Where the operands of one check lie: slots as in an engine, every operand fenced by guard bytes."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lily.ops import Tensor
from lily.plan import Slot, SlotKind, View
from lily.reference import as_float64, bfloat16_bits

__all__ = ["GUARD", "POISON", "STALE", "Memory", "array_of", "decode", "fill", "round_up"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Array = np.ndarray[Any, np.dtype[Any]]

GUARD = 64
"""Bytes on either side of an operand that nothing may touch: a vector register's worth."""

POISON = bytes((0xC0, 0xFF))
"""Repeated, what is NaN as float32 and as bfloat16, and negative as an int32."""

STALE = bytes((0x4B, 0x4C))
"""Repeated, another content of memory that nobody has written: a large float32 and bfloat16."""

_STORED = {"f32": np.float32, "bf16": np.uint16, "i32": np.int32, "u8": np.uint8}
_RESERVED = 512 << 20
_WORTH_MOVING = 32 << 20
_NAMES = {
    SlotKind.WEIGHTS: "weights",
    SlotKind.STATE: "state",
    SlotKind.KV: "kv",
    SlotKind.SCRATCH: "activations",
    SlotKind.CONTROL: "control",
}


def fill(target: Bytes, pattern: bytes) -> None:
    """Repeat a two-byte pattern over ``target``; where it starts does not matter to what uses it."""
    target[0::2] = pattern[0]
    target[1::2] = pattern[1]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def array_of(image: Bytes, tensor: Tensor) -> Array:
    """A tensor's elements in an image of its slot, as they are stored (bfloat16 as ``uint16`` bits); not a copy."""
    view = tensor.view
    raw = image[view.offset : view.offset + view.nbytes]
    return raw.view(_STORED[tensor.dtype]).reshape(tensor.shape)


def _pages(nbytes: int) -> Bytes:
    # Anonymous pages are committed as they are touched, so reserving much costs nothing; and they are page-aligned,
    # which hosts that bind a mapping without a copy may need.
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


@dataclass
class _Region:
    slot: Slot
    image: Bytes
    used: int = 0


@dataclass
class Memory:
    """The slots of one check and their content before a run.

    Attributes:
        activation_dtype: of the tensors whose dtype the host decides, f32 or bf16.
        skew: bytes by which weights miss their alignment: in a mapped checkpoint they start anywhere.
        writable: ranges that a run may write; all other bytes must come out as they were.
        outputs: those of them that hold nothing before a run.
    """

    activation_dtype: str = "f32"
    skew: int = 0
    writable: list[View] = field(default_factory=list)
    outputs: list[View] = field(default_factory=list)
    _regions: dict[SlotKind, _Region] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, (kind, name) in enumerate(_NAMES.items()):
            self._regions[kind] = _Region(Slot(index, kind, name), _pages(_RESERVED))

    @property
    def arena_slot(self) -> Slot:
        """The slot of what variants take by ``plan.scratch``; its size is known once they have encoded."""
        return Slot(len(self._regions), SlotKind.SCRATCH, "temporaries")

    def place(self, kind: SlotKind, nbytes: int, *, skew: int = 0) -> View:
        """Room for ``nbytes`` in a slot, aligned to 64 bytes plus ``skew``, guards on both sides."""
        region = self._regions[kind]
        offset = round_up(region.used + GUARD, GUARD) + skew
        end = offset + nbytes + GUARD
        if end > _RESERVED:
            raise ValueError(f"a check of {end} bytes in slot {region.slot.name} is too large")
        fill(region.image[region.used : offset], POISON)
        fill(region.image[offset + nbytes : end], POISON)
        region.used = end
        return View(region.slot, offset, nbytes)

    def compact(self) -> None:
        """Give back what was reserved in vain, once all operands are placed."""
        for region in self._regions.values():
            if region.used < _WORTH_MOVING:
                moved = _pages(max(region.used, 1))
                moved[: region.used] = region.image[: region.used]
                region.image = moved

    def bytes_of(self, view: View) -> Bytes:
        """The content of a view before a run, to be written or read in place."""
        return self.image(view.slot.index)[view.offset : view.offset + view.nbytes]

    def image(self, slot: int) -> Bytes:
        """The whole content of a slot before a run."""
        region = next(region for region in self._regions.values() if region.slot.index == slot)
        return region.image[: region.used]

    @property
    def slots(self) -> list[Slot]:
        """All slots but the arena's, by index."""
        return [region.slot for region in self._regions.values()]

    @property
    def nbytes(self) -> int:
        return sum(region.used for region in self._regions.values())

    def tensor(self, kind: SlotKind, values: Any, dtype: str | None = None) -> Tensor:
        """An operand that holds ``values``, converted to ``dtype`` (the activations' if none is given)."""
        dtype = dtype or self.activation_dtype
        given = np.asarray(values)
        stored = bfloat16_bits(given) if dtype == "bf16" else np.ascontiguousarray(given.astype(_STORED[dtype]))
        view = self.place(kind, stored.nbytes)
        self.bytes_of(view)[:] = stored.reshape(-1).view(np.uint8)
        return Tensor(view, tuple(given.shape), dtype)

    def output(self, kind: SlotKind, *shape: int, dtype: str | None = None) -> Tensor:
        """An operand without content that a run must write."""
        dtype = dtype or self.activation_dtype
        nbytes = int(np.prod(shape)) * np.dtype(_STORED[dtype]).itemsize
        tensor = Tensor(self.place(kind, nbytes), shape, dtype)
        self.outputs.append(tensor.view)
        self.writable.append(tensor.view)
        self.clear(POISON)
        return tensor

    def updated(self, tensor: Tensor) -> Tensor:
        """Let runs write an operand that has content."""
        self.writable.append(tensor.view)
        return tensor

    def clear(self, pattern: bytes) -> None:
        """Put a pattern where outputs will be."""
        for view in self.outputs:
            fill(self.bytes_of(view), pattern)

    def values(self, tensor: Tensor) -> Array:
        """Content before a run: float64 for floats, int64 for integers."""
        return decode(self.image(tensor.view.slot.index), tensor)


def decode(image: Bytes, tensor: Tensor) -> Array:
    """A tensor's elements in an image of its slot: float64 for floats, int64 for integers."""
    stored = array_of(image, tensor)
    return stored.astype(np.int64) if tensor.dtype in ("i32", "u8") else as_float64(stored)
