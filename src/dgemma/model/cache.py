"""The prefix cache: keys and values of everything already committed.

Rows are left-aligned: row b's first `lengths[b]` slots are its tokens, in order and without padding. So a row's result
depends on its batch only through rounding. Sliding layers keep only the tokens that a later token can still see. So a
long prefix needs memory in the full layers alone: 262,144 tokens of the 26B model take 5.4 GB instead of 59.

    length        of         meaning
    lengths       each row   tokens read, without padding, (B,) on the device
    num_slots     the cache  the largest of `lengths`, known to the host
    num_seen      the cache  tokens read, with padding: the width of their attention mask
    window, keep  a layer    tokens that a causal query sees, and tokens kept for later queries; None in a full layer
    num_filled    a layer    slots in use: `num_slots`, at most `keep`; the buffers may have more
"""

from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

from dgemma.checks import in_range, require, require_tensor, typed
from dgemma.model.config import Conventions, ModelConfig

Made = TypeVar("Made")

_GROWTH = 1.25  # growth of a full buffer, so that appending takes linear time


@runtime_checkable
class Cache(Protocol):
    """The protocol of prefix caches, which `PrefixCache`, the fused engine, `Guided` and wrapped models implement.

    A denoiser makes and extends its own cache, in `encode`. All other code reads and copies caches through these
    members. Rows keep their order. A cache may hold anything from which `denoise` can predict a canvas.
    """

    @property
    def batch_size(self) -> int: ...
    @property
    def lengths(self) -> Tensor:
        """The number of tokens per row, (B,) int64, on the device."""

    @property
    def num_slots(self) -> int:
        """The number of tokens of the longest row, known to the host."""

    @property
    def num_seen(self) -> int:
        """The number of tokens read so far, including padding: the width of their attention mask."""

    def clone(self) -> Self:
        """An independent copy: extending one leaves the other unchanged."""

    def select(self, rows: Tensor) -> Self:
        """The cache of some rows: rows (R,) int64 → batch size R."""

    def splice(self, rows: Tensor, donor: Any) -> None:
        """Replace `rows` (R,) in place by the rows of a donor of batch size R or 1."""


class LayerCache:
    """Keys and values of one layer, (B, K, capacity, H) each.

    `window` is the number of tokens that a causal query sees, including itself.
    """

    def __init__(self, keys: Tensor, values: Tensor, window: int | None, keep: int | None) -> None:
        self.keys, self.values, self.window, self.keep = keys, values, window, keep

    def filled(self, lengths: Tensor) -> Tensor:
        """Return the number of slots that each row uses: (B,) → (B,)."""
        return lengths if self.keep is None else lengths.clamp(max=self.keep)

    def num_filled(self, num_slots: int) -> int:
        return num_slots if self.keep is None else min(num_slots, self.keep)

    def view(self, num_slots: int) -> tuple[Tensor, Tensor]:
        """The slots in use: two (B, K, S, H)."""
        filled = self.num_filled(num_slots)
        return self.keys[:, :, :filled], self.values[:, :, :filled]

    def append(self, keys: Tensor, values: Tensor, num_slots: int, order: Tensor | None) -> None:
        """Add T tokens after `num_slots` slots. For ragged rows, order (B, S') indexes old + new tokens."""
        self.keys = self._append(self.keys, keys, num_slots, order)
        self.values = self._append(self.values, values, num_slots, order)

    def _append(self, old: Tensor, new: Tensor, num_slots: int, order: Tensor | None) -> Tensor:
        start = self.num_filled(num_slots)
        end = start + new.shape[2]
        if order is not None:  # rows of different lengths: each one's tokens move to its front
            joined = torch.cat((old[:, :, :start], new), dim=2)
            return joined.gather(2, order[:, None, :, None].expand(-1, joined.shape[1], -1, joined.shape[3]))
        if self.keep is not None or old.requires_grad or new.requires_grad:  # autograd forbids writing in place
            joined = torch.cat((old[:, :, :start], new), dim=2)
            return joined if self.keep is None else joined[:, :, -self.keep :].contiguous()  # free the dropped slots
        if end > old.shape[2]:
            old = _grow(old, start, end)
        old[:, :, start:end] = new
        return old


class PrefixCache:
    """Keys and values of the prefix. `model.encode` makes it; `encode` and `causal_logits` extend it in place.

    Example: `cache = model.encode(prompt); longer = model.encode(reply, cache.clone())`.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        conventions: Conventions | None = None,
    ) -> None:
        extra = 1 if (conventions or Conventions()).sliding_prefix == "window" else 0
        self.layers: list[LayerCache] = []
        for layer in range(config.num_hidden_layers):
            shape = config.layer_shape(layer)
            empty = torch.empty(batch_size, shape.num_key_value_heads, 0, shape.head_dim, device=device, dtype=dtype)
            keep = None if shape.window is None else shape.window - 1 + extra
            self.layers.append(LayerCache(empty, empty, shape.window, keep))
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.num_slots = 0
        self.num_seen = 0  # tokens read so far with padding: the width of their attention mask
        self.ragged = False  # True if rows may differ in length

    def __repr__(self) -> str:
        return f"{type(self).__name__}(lengths={self.lengths.tolist()}, num_layers={len(self.layers)})"

    @property
    def batch_size(self) -> int:
        return self.lengths.shape[0]

    @property
    def num_bytes(self) -> int:
        """Memory of the keys and values, in bytes."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in (layer.keys, layer.values))

    @typed
    def reserve(self, num_tokens: int) -> None:
        """Reserve room for `num_tokens` in total, so that appending up to there never copies."""
        for layer in self.layers:
            if layer.keep is None and layer.keys.shape[2] < num_tokens:
                layer.keys = _grow(layer.keys, self.num_slots, num_tokens)
                layer.values = _grow(layer.values, self.num_slots, num_tokens)

    def append(self, new: list[tuple[Tensor, Tensor]], real: Tensor | None) -> None:
        """Add T tokens: per layer keys and values (B, K, T, H). real (B, T) is False for padding; None: all real."""
        num_new = new[0][0].shape[2]
        counts = None if real is None else real.sum(1)
        ragged = self.ragged or real is not None
        num_slots = self.num_slots + num_new
        if counts is not None and not torch.compiler.is_compiling():
            # Padding takes no slot. Compiled code cannot read the lengths, so there `num_slots` includes padding.
            num_slots = int((self.lengths + counts).max())
        orders = self.by_kind(lambda layer: self._order(layer, num_new, num_slots, real) if ragged else None)
        for layer, (keys, values), order in zip(self.layers, new, orders, strict=True):
            layer.append(keys, values, self.num_slots, order)
        self.lengths = self.lengths + (num_new if counts is None else counts)
        self.num_slots, self.ragged = num_slots, ragged
        self.num_seen += num_new

    def views(self) -> list[tuple[Tensor, Tensor] | None]:
        """The slots in use of every layer: two (B, K, S, H), or None if there are none."""
        return [layer.view(self.num_slots) if self.num_slots else None for layer in self.layers]

    def by_kind(self, make: Callable[[LayerCache], Made]) -> list[Made]:
        """Return make(layer) for every layer. It is called once per kind of layer, and layers of a kind share it."""
        made = {keep: make(layer) for keep, layer in {layer.keep: layer for layer in self.layers}.items()}
        return [made[layer.keep] for layer in self.layers]

    def _order(self, layer: LayerCache, num_new: int, num_slots: int, real: Tensor | None) -> Tensor:
        """Return which token each slot gets in `append`: (B, S'), counting the old slots first, then the new tokens.

        Rows with 3 and 1 of 3 slots filled get 2 new tokens, of which the second row's first is padding. That row keeps
        slot 0 and gets token 4, so its order begins [0, 4].
        """
        old = torch.arange(layer.num_filled(self.num_slots), device=self.lengths.device)
        if real is None:
            real = torch.ones(self.batch_size, num_new, dtype=torch.bool, device=self.lengths.device)
        valid = torch.cat((old < layer.filled(self.lengths)[:, None], real), dim=1)
        in_order = (~valid).to(torch.uint8).sort(dim=1, stable=True).indices  # the row's tokens first, in order
        num_valid = valid.sum(1, keepdim=True)
        first = num_valid - layer.filled(num_valid)  # a sliding layer drops the oldest
        slot = torch.arange(layer.num_filled(num_slots), device=self.lengths.device)
        return in_order.gather(1, (first + slot).clamp(max=in_order.shape[1] - 1))

    def clone(self) -> Self:
        """An independent copy: extending one leaves the other unchanged."""
        return self._rebuild(lambda tensor: tensor.clone())

    def select(self, rows: Tensor) -> Self:
        """The cache of some rows: rows (R,) int64 → batch size R."""
        self._check_rows(rows)
        return self._rebuild(lambda tensor: tensor.index_select(0, rows))

    def splice(self, rows: Tensor, donor: Self) -> None:
        """Replace `rows` (R,) in place by the rows of a donor, or all by its only row.

        Example: `cache.splice(torch.tensor([1]), model.encode(prompt))` gives row 1 another prefix.
        """
        self._check_rows(rows)
        fits = isinstance(donor, PrefixCache) and len(donor.layers) == len(self.layers)
        fits = fits and donor.batch_size in (1, len(rows))
        require(fits, "PrefixCache.splice donor", f"be a cache of {len(rows)} rows of the same model", donor)
        for layer, theirs in zip(self.layers, donor.layers, strict=True):
            layer.keys = _splice(layer.keys, rows, theirs.keys, theirs.num_filled(donor.num_slots))
            layer.values = _splice(layer.values, rows, theirs.values, theirs.num_filled(donor.num_slots))
        self.lengths = self.lengths.index_copy(0, rows, donor.lengths.expand(len(rows)))
        self.num_slots, self.num_seen = int(self.lengths.max()), max(self.num_seen, donor.num_seen)
        self.ragged = True

    def _check_rows(self, rows: Tensor) -> None:
        rule = f"be row numbers (R,) int64 below {self.batch_size}"
        require_tensor(rows, "PrefixCache rows", rule, shape=(None,), dtypes=(torch.int64, torch.int32))
        require(in_range(rows, self.batch_size), "PrefixCache rows", rule, rows)

    def _rebuild(self, transform: Callable[[Tensor], Tensor]) -> Self:
        copy = object.__new__(type(self))
        copy.layers = [LayerCache(transform(c.keys), transform(c.values), c.window, c.keep) for c in self.layers]
        copy.lengths = transform(self.lengths)
        copy.num_slots, copy.num_seen, copy.ragged = self.num_slots, self.num_seen, self.ragged
        return copy


def _splice(buffer: Tensor, rows: Tensor, donor: Tensor, num_used: int) -> Tensor:
    """Write the first slots of a donor's rows into `rows` of a buffer, and return the buffer."""
    if num_used > buffer.shape[2]:
        buffer = _grow(buffer, buffer.shape[2], num_used)
    buffer[rows, :, :num_used] = donor[:, :, :num_used]
    return buffer


def _grow(buffer: Tensor, num_used: int, num_needed: int) -> Tensor:
    """Return a buffer with room for `num_needed` slots, at least `_GROWTH` times as large as before."""
    capacity = max(num_needed, int(buffer.shape[2] * _GROWTH))
    grown = buffer.new_zeros(*buffer.shape[:2], capacity, buffer.shape[3])
    grown[:, :, :num_used] = buffer[:, :, :num_used]
    return grown
