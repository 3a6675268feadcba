"""Where everything lies: the slots of a plan, the layout of a session's state, the pool of KV pages."""

from __future__ import annotations

from dataclasses import dataclass

from lily.config import ModelConfig
from lily.errors import HostError
from lily.hosts.base import Buffer, Host
from lily.ops import Tensor
from lily.plan import Slot, SlotKind, View
from lily.step import PAGE_TOKENS, STEP_DTYPE

__all__ = ["KvPool", "Slots", "StateLayout"]

ITEMSIZE = {"f32": 4, "bf16": 2, "i32": 4, "u8": 1}
ALIGNMENT = 64


def align(nbytes: int) -> int:
    """Rounded up to a cache line."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Slots:
    """The slots of every plan of one model: weight sources first, then what an engine and a session own.

    Args:
        sources: how many byte sources the weights lie in.
    """

    def __init__(self, sources: int) -> None:
        names = [
            *((SlotKind.WEIGHTS, f"weights.{i}") for i in range(sources)),
            (SlotKind.SCRATCH, "activations"),
            (SlotKind.SCRATCH, "temporaries"),
            (SlotKind.SCRATCH, "logits"),
            (SlotKind.CONTROL, "mask"),
            (SlotKind.KV, "kv"),
            (SlotKind.STATE, "state"),
            (SlotKind.CONTROL, "step"),
            (SlotKind.CONTROL, "pages"),
            (SlotKind.CONTROL, "tokens"),
            (SlotKind.CONTROL, "counts"),
        ]
        slots = [Slot(i, kind, name) for i, (kind, name) in enumerate(names)]
        self.weights = slots[:sources]
        self.activations, self.temporaries, self.logits, self.mask, self.kv = slots[sources : sources + 5]
        self.state, self.step, self.pages, self.tokens, self.counts = slots[sources + 5 :]

    def step_view(self, field: str | None = None) -> View:
        """The step parameters, or one field of them."""
        if field is None:
            return View(self.step, 0, STEP_DTYPE.itemsize)
        dtype, offset = STEP_DTYPE.fields[field][:2]  # type: ignore[index]
        return View(self.step, offset, dtype.itemsize)


@dataclass(frozen=True)
class StateLayout:
    """A session's recurrent and convolution state, one region a DeltaNet layer, all layers in one buffer.

    The recurrent state is float32 ``[value_heads, value_dim, key_dim]``; the convolution's last inputs are
    ``[taps - 1, channels]`` in the activations' dtype (model_spec §6).
    """

    config: ModelConfig
    activation_dtype: str

    @property
    def _conv_shape(self) -> tuple[int, int]:
        return (self.config.linear_conv_kernel_dim - 1, self.config.conv_dim)

    @property
    def _state_shape(self) -> tuple[int, int, int]:
        c = self.config
        return (c.linear_num_value_heads, c.linear_value_head_dim, c.linear_key_head_dim)

    @property
    def conv_nbytes(self) -> int:
        taps, channels = self._conv_shape
        return taps * channels * ITEMSIZE[self.activation_dtype]

    @property
    def state_nbytes(self) -> int:
        heads, rows, cols = self._state_shape
        return heads * rows * cols * 4

    @property
    def layer_nbytes(self) -> int:
        return align(self.conv_nbytes) + align(self.state_nbytes)

    @property
    def nbytes(self) -> int:
        return self.layer_nbytes * len(self.config.linear_layers)

    def conv(self, slot: Slot, layer: int) -> Tensor:
        """The convolution state of the ``layer``-th DeltaNet layer."""
        view = View(slot, layer * self.layer_nbytes, self.conv_nbytes)
        return Tensor(view, self._conv_shape, self.activation_dtype)

    def recurrent(self, slot: Slot, layer: int) -> Tensor:
        """The recurrent state of the ``layer``-th DeltaNet layer."""
        view = View(slot, layer * self.layer_nbytes + align(self.conv_nbytes), self.state_nbytes)
        return Tensor(view, self._state_shape, "f32")


KV_AUTO_LIMIT = 256 << 20  # bytes of float32 keys and values at the model's whole context


def resolve_kv_dtype(setting: str, config: ModelConfig) -> str:
    """What ``execution.kv_dtype`` comes to for a model: ``auto`` is f32 where a whole context of it is cheap."""
    if setting != "auto":
        return setting
    context_nbytes = 2 * len(config.full_layers) * config.kv_dim * 4 * config.max_position_embeddings
    return "f32" if context_nbytes <= KV_AUTO_LIMIT else "bf16"


class KvPool:
    """Pages of the KV cache, shared by an engine's sessions and their snapshots by reference counts.

    One buffer, reserved whole and committed as pages are first written (the CPU host), never grown by copying. Layer
    by layer it holds keys ``[pages, kv_heads, PAGE_TOKENS, head_dim]``, then values likewise.
    """

    def __init__(self, host: Host, config: ModelConfig, tokens: int, dtype: str) -> None:
        self.config = config
        self.dtype = resolve_kv_dtype(dtype, config)
        self.capacity = -(-tokens // PAGE_TOKENS)
        self._shape = (self.capacity, config.num_key_value_heads, PAGE_TOKENS, config.head_dim)
        self._page_nbytes = config.num_key_value_heads * PAGE_TOKENS * config.head_dim * ITEMSIZE[self.dtype]
        self._host = host
        self.buffer: Buffer = host.allocate(2 * len(config.full_layers) * self.capacity * self._page_nbytes, "KV cache")
        self._free = list(range(self.capacity - 1, -1, -1))
        self._references = [0] * self.capacity

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page over all layers, keys and values."""
        return 2 * len(self.config.full_layers) * self._page_nbytes

    @property
    def used(self) -> int:
        """Pages with at least one owner."""
        return self.capacity - len(self._free)

    def tensors(self, slot: Slot, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the ``layer``-th full-attention layer."""
        nbytes = self.capacity * self._page_nbytes
        views = (View(slot, (2 * layer + part) * nbytes, nbytes) for part in (0, 1))
        keys, values = (Tensor(view, self._shape, self.dtype) for view in views)
        return keys, values

    def take(self) -> int:
        """A free page, owned once.

        Raises:
            HostError: every page is in use.
        """
        if not self._free:
            raise HostError(
                f"the KV cache is full: all {self.capacity * PAGE_TOKENS} tokens are in use; "
                "close a session or raise --cache-tokens"
            )
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, pages: list[int]) -> list[int]:
        """The same pages with one more owner."""
        for page in pages:
            self._references[page] += 1
        return list(pages)

    def drop(self, pages: list[int]) -> None:
        """One owner fewer; pages without owners are free again."""
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def own(self, page: int) -> int:
        """A page that only the caller owns: ``page`` itself, or a copy of it if others hold it too."""
        if self._references[page] == 1:
            return page
        copy = self.take()
        for part in range(2 * len(self.config.full_layers)):
            base = part * self.capacity * self._page_nbytes
            source, target = (base + index * self._page_nbytes for index in (page, copy))
            self._host.copy(self.buffer, source, self.buffer, target, self._page_nbytes)
        self.drop([page])
        return copy
