"""A plan as the flat arrays that a host submits in one native call, whatever the number of dispatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lily.plan import Dispatch

__all__ = ["BINDING_DTYPE", "CONSTANTS_ALIGNMENT", "DISPATCH_DTYPE", "pack"]

Records = np.ndarray[Any, np.dtype[np.void]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# The layout of kernels/cpu/runtime.h and objc/: one flat array each of dispatches and bindings, one blob of constants.
DISPATCH_DTYPE = np.dtype(
    [
        ("kernel", "<u4"),
        ("binding_first", "<u4"),
        ("binding_count", "<u4"),
        ("constants_offset", "<u4"),
        ("constants_size", "<u4"),
        ("tasks", "<u4", (3,)),
        ("threads", "<u4", (3,)),
        ("worker_bytes", "<u4"),
        ("barrier", "<u4"),
        ("reserved", "<u4"),
    ]
)
BINDING_DTYPE = np.dtype([("slot", "<u4"), ("access", "<u4"), ("offset", "<u8"), ("size", "<u8")])
CONSTANTS_ALIGNMENT = 16


def pack(dispatches: Sequence[Dispatch], kernel_ids: Mapping[str, int]) -> tuple[Records, Records, Bytes]:
    """Dispatches as the flat arrays a host submits in one call.

    Returns:
        dispatches ``[n]`` of DISPATCH_DTYPE, bindings ``[m]`` of BINDING_DTYPE, constants as bytes (uint8).
    """
    rows = np.zeros(len(dispatches), DISPATCH_DTYPE)
    bindings: list[tuple[int, int, int, int]] = []
    blob = bytearray()
    for row, dispatch in zip(rows, dispatches, strict=True):
        blob.extend(b"\0" * (-len(blob) % CONSTANTS_ALIGNMENT))
        row["kernel"] = kernel_ids[dispatch.kernel]
        row["binding_first"], row["binding_count"] = len(bindings), len(dispatch.accesses)
        row["constants_offset"], row["constants_size"] = len(blob), len(dispatch.constants)
        row["tasks"], row["threads"] = dispatch.tasks, dispatch.threads
        row["worker_bytes"], row["barrier"] = dispatch.worker_bytes, dispatch.barrier
        blob.extend(dispatch.constants)
        for access in dispatch.accesses:
            view = access.view
            bindings.append((view.slot.index, access.reads | access.writes << 1, view.offset, view.nbytes))
    constants = np.frombuffer(bytes(blob) or b"\0", np.uint8)
    return rows, np.array(bindings, BINDING_DTYPE), constants
