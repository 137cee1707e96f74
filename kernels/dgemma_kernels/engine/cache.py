"""The engine's prefix cache, and the static tensors over which all of its forwards run.

A CUDA graph stays valid only over constant addresses. So there is one `Arena` per denoiser, and every graph is captured
over it. A cache is in the arena while a forward uses it. When another cache needs the arena, its keys and values move
to tensors of their exact size, where they are those of a `dgemma.model.cache.PrefixCache`. So any number of caches
share the graphs, and a cache at rest takes no more memory than its tokens.

In the arena, a forward writes the keys and values of its tokens into a tail after the prefix, and a commit only adds to
a length. `trim` moves the newest tokens of a sliding layer to its front.
"""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from dgemma.model.cache import LayerCache, PrefixCache
from dgemma.model.config import Conventions, ModelConfig
from dgemma_kernels.engine.graphs import GraphMemory, Graphs, Replay, Turn, copy_all, in_turn, use_here

_LEAST_SLOTS = 16_384  # of full layers, over all rows
_GROWTH = 1.5  # of tensors that are too small, because their graphs are captured again
_GAP = 64  # slots around a sliding layer's rows, which a tile of `attention` may read but no token sees
_ROWS = 16  # counters come in multiples of it, so that both begin at a multiple of 16 bytes


class CacheBuffers:
    """The arena for a batch of B rows: keys and values of every layer, (B, K, capacity, H) each, and counters."""

    def __init__(self, arena: "Arena", batch_size: int) -> None:
        config, self.keep = arena.config, arena.keep
        self.window_capacity = arena.keep + arena.tail_len(batch_size)
        self.capacity = arena.capacity(batch_size)
        self.keys: list[Tensor] = [torch.empty(0)] * config.num_hidden_layers
        self.values: list[Tensor] = [*self.keys]
        self.sliding: Tensor | None = None  # keys and values of all sliding layers: (2, layers, B, K, slots + _GAP, H)
        for is_sliding, memory in arena.tensors.items():
            layers = arena.layers[is_sliding]
            shape = config.layer_shape(layers[0])
            slots = self.window_capacity if is_sliding else self.capacity
            gap = _GAP if is_sliding else 0
            size = (2, len(layers), batch_size, shape.num_key_value_heads, slots + gap, shape.head_dim)
            both = memory[gap * shape.head_dim :][: math.prod(size)].view(size)
            for at, layer in enumerate(layers):
                self.keys[layer], self.values[layer] = both[:, at, ..., :slots, :]
            if is_sliding:
                self.sliding = both
        self.counters = arena.counters[:, :batch_size]
        self.lengths, self.window_lengths = self.counters  # tokens of each row; those that a sliding layer still has


class Arena:
    """The static tensors of one denoiser's caches. Batches of all sizes share the memory, and one cache uses it.

    `graphs`, of all forwards, are captured over them. They are dropped when the tensors are replaced by larger ones.
    """

    def __init__(
        self,
        config: ModelConfig,
        conventions: Conventions,
        dtype: torch.dtype,
        most_read: int,
        memory: GraphMemory,
        graphs: Graphs,
    ) -> None:
        self.config, self.conventions, self.dtype, self.memory, self.graphs = config, conventions, dtype, memory, graphs
        self.device, self.turn = memory.device, memory.turn
        self.most_read = most_read  # tokens of one forward, over all rows
        self.keep = config.sliding_window - (0 if conventions.sliding_prefix == "window" else 1)
        self.layers: dict[bool, list[int]] = {}  # by whether they are sliding layers
        for layer in range(config.num_hidden_layers):
            self.layers.setdefault(config.layer_shape(layer).window is not None, []).append(layer)
        self.tensors = {kind: torch.empty(0, dtype=dtype, device=self.device) for kind in self.layers}
        self.counters = torch.zeros(2, 0, dtype=torch.int64, device=self.device)
        self._least_tail = 2 * config.canvas_length  # a finished canvas that is not read yet, and one being denoised
        self._buffers: dict[int, CacheBuffers] = {}
        self.seated: Callable[[], FusedCache | None] = lambda: None  # the cache whose keys and values are here

    def prefill_len(self, batch_size: int) -> int:
        """Tokens per row that one forward reads: as many as allowed, because they share one read of the weights."""
        return max(self.config.canvas_length, self.most_read // max(batch_size, 1))

    def tail_len(self, batch_size: int) -> int:
        return max(self._least_tail, self.prefill_len(batch_size))

    def capacity(self, batch_size: int) -> int:
        """Tokens per row for which full layers have room."""
        if False not in self.tensors:
            return 1 << 62
        return self.tensors[False].numel() // max(self._values_per_slot(False) * batch_size, 1) // _GAP * _GAP

    def buffers(self, batch_size: int) -> CacheBuffers:
        if batch_size not in self._buffers:
            self._buffers[batch_size] = CacheBuffers(self, batch_size)
        return self._buffers[batch_size]

    def has_room(self, batch_size: int, num_slots: int, num_new: int) -> bool:
        """Return True if the tensors fit B rows of `num_slots` tokens, of which up to `num_new` are new."""
        return (
            batch_size <= self.counters.shape[1]
            and num_slots <= self.capacity(batch_size)
            and num_new <= self.tail_len(batch_size)
            and all(self._needs(kind, batch_size, 0) <= tensor.numel() for kind, tensor in self.tensors.items())
        )

    @in_turn
    def make_room(self, batch_size: int, num_slots: int, num_new: int) -> None:
        """Replace tensors that are too small, and drop all graphs. The cache in the arena leaves it first."""
        if self.has_room(batch_size, num_slots, num_new):
            return
        if (seated := self.seated()) is not None:
            seated.leave()
        self._buffers.clear()
        self.graphs.clear()
        self._least_tail = max(self._least_tail, num_new if num_new > self.tail_len(batch_size) else 0)
        if batch_size > self.counters.shape[1]:
            num_rows = -(-batch_size // _ROWS) * _ROWS
            self.counters = torch.zeros(2, num_rows, dtype=torch.int64, device=self.device)
        capacity = -(-max(num_slots, _LEAST_SLOTS // max(batch_size, 1)) // _GAP) * _GAP
        for kind, old in self.tensors.items():
            size = self._needs(kind, batch_size, capacity)
            if size > (least := old.numel()):
                use_here(old)
                del old
                self.tensors[kind] = self.tensors[kind].new_empty(0)  # frees the old memory first
                self.tensors[kind] = self.tensors[kind].new_zeros(max(size, int(_GROWTH * least)))

    def capture_trim(self, batch_size: int) -> Replay:
        """Return the graph that moves the newest tokens of sliding layers to their front."""
        buffers = self.buffers(batch_size)

        def run() -> None:  # a second run does nothing, so capture may run it twice
            if buffers.sliding is not None:
                forget(buffers.sliding, buffers.window_lengths, buffers.keep)
            buffers.window_lengths.clamp_(max=buffers.keep)

        captured: Replay = self.graphs.remembered(("trim", batch_size), partial(Replay, run, self.memory))
        return captured

    def _values_per_slot(self, kind: bool) -> int:
        shape = self.config.layer_shape(self.layers[kind][0])
        return 2 * len(self.layers[kind]) * shape.num_key_value_heads * shape.head_dim

    def _needs(self, kind: bool, batch_size: int, capacity: int) -> int:
        """Return how many values B rows take, with `capacity` slots in full layers."""
        if not kind:
            return batch_size * capacity * self._values_per_slot(kind)
        slots = batch_size * (self.keep + self.tail_len(batch_size) + _GAP)
        return slots * self._values_per_slot(kind) + _GAP * self.config.layer_shape(self.layers[kind][0]).head_dim


def forget(sliding: Tensor, lengths: Tensor, keep: int) -> None:
    """Move each row's last `keep` tokens to the front of its buffers, in place. Layers take turns, to save memory.

    sliding: keys and values (2, layers, B, K, slots, H); row b has its tokens in the slots [0, lengths[b]).

    Example: `forget(buffers.sliding, buffers.window_lengths, 1023)`.
    """
    shift = (lengths - keep).clamp(min=0)
    slot = (shift[:, None] + torch.arange(keep, device=lengths.device))[:, None, :, None]  # (B, 1, keep, 1)
    for layer in sliding.view(torch.int64).unbind(1):  # words of 8 bytes are copied faster
        front = layer[..., :keep, :]
        front.copy_(layer.gather(3, slot.expand_as(front)))


class FusedCache(PrefixCache):
    """A `PrefixCache` whose keys and values are in the arena while forwards use them. Only the fused denoiser makes it.

    `layers` takes them out of the arena. So what copies, joins or marks caches is the library's own code.

    A finished block may be `postponed`: it counts as read, but the engine reads it together with the next canvas, in
    one pass over the weights. If other code needs the cache first, `catch_up` reads the block.
    """

    arena: Arena
    postponed: Tensor | None = None  # (B, C) tokens
    num_held = 0  # in the arena: the most tokens a row has in a sliding layer, as far as the host knows
    _read: Callable[[Tensor, "FusedCache"], None] | None = None

    def __init__(self, arena: Arena, batch_size: int) -> None:
        self.arena = arena
        where: dict[str, Any] = {"device": arena.device, "dtype": arena.dtype}
        super().__init__(arena.config, batch_size, **where, conventions=arena.conventions)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.clone()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "FusedCache must not be pickled or copied, because it belongs to its denoiser. Keep its tokens, and encode "
            "them again; clone() makes a copy for the same denoiser."
        )

    @property
    def turn(self) -> Turn:
        return self.arena.turn

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row, (B,) int64: a new tensor at every change, so earlier ones keep their values."""
        return self._lengths if self.postponed is None else self._lengths + self.num_postponed

    @lengths.setter
    def lengths(self, lengths: Tensor) -> None:
        self._lengths = lengths

    @property
    def num_slots(self) -> int:
        return self._num_slots + self.num_postponed

    @num_slots.setter
    def num_slots(self, num_slots: int) -> None:
        self._num_slots = num_slots

    @property
    def num_seen(self) -> int:
        return self._num_seen + self.num_postponed

    @num_seen.setter
    def num_seen(self, num_seen: int) -> None:
        self._num_seen = num_seen

    @property
    def layers(self) -> list[LayerCache]:
        """The keys and values of every layer, outside of the arena and with the postponed tokens."""
        with self.turn:
            self.catch_up()
            self.leave()
        return self._layers

    @layers.setter
    def layers(self, layers: list[LayerCache]) -> None:
        self._layers = layers

    @property
    def num_postponed(self) -> int:
        """Tokens per row that count as read but are not."""
        return 0 if self.postponed is None else self.postponed.shape[1]

    def postpone(self, tokens: Tensor, read: Callable[[Tensor, "FusedCache"], None]) -> None:
        """Count tokens (B, C) as read; `read(tokens, cache)` is called when they are needed."""
        self.catch_up()
        self.postponed, self._read = tokens.clone(), read

    @contextmanager
    def for_canvas(self, canvas_len: int) -> Iterator[tuple[CacheBuffers, Tensor | None]]:
        """Enter the arena with room for a canvas, and yield the buffers and the postponed tokens, if any.

        A forward in the `with` block reads those tokens before the canvas. After the block they are committed.
        """
        buffers = self.make_room(self.num_postponed + canvas_len)
        self.trim()
        yield buffers, self.postponed
        if (tokens := self.take_postponed()) is not None:
            self.extend(tokens.shape[1], None)

    def take_postponed(self) -> Tensor | None:
        """Return the postponed tokens (B, C), which the caller must read; None if there are none."""
        tokens, self.postponed = self.postponed, None
        return tokens

    @in_turn
    def catch_up(self) -> None:
        """Read the postponed tokens."""
        tokens = self.take_postponed()
        if tokens is None:
            return
        num_slots = self._num_slots
        assert self._read is not None
        try:
            self._read(tokens, self)
        except BaseException:
            if self._num_slots == num_slots:
                self.postponed = tokens  # they were not read, so they stay postponed
            raise

    @in_turn
    def make_room(self, num_new: int, num_later: int = 0) -> CacheBuffers:
        """Enter the arena, with room for `num_new` tokens per row, and for `num_later` more in full layers."""
        arena, batch = self.arena, self.batch_size
        arena.make_room(batch, self._num_slots + num_new + num_later, num_new)
        buffers = arena.buffers(batch)
        if (seated := arena.seated()) is not self:
            if seated is not None:
                seated.leave()
            self._enter(buffers)
        if self.num_held + num_new > buffers.window_capacity:
            self.trim()
        return buffers

    def _enter(self, buffers: CacheBuffers) -> None:
        filled = [layer.num_filled(self._num_slots) for layer in self._layers]
        sources = [tensor for layer in self._layers for tensor in (layer.keys, layer.values)]
        use_here(self._lengths, *sources)
        pairs = zip(buffers.keys, buffers.values, strict=True)
        targets = [tensor for pair in pairs for tensor in pair]
        sizes = [size for size in filled for _ in range(2)]
        copy_all(*([x[:, :, :size] for x, size in zip(xs, sizes, strict=True)] for xs in (targets, sources)))
        buffers.lengths.copy_(self._lengths)
        buffers.window_lengths.copy_(self._lengths.clamp(max=buffers.keep))
        self.num_held = min(self._num_slots, buffers.keep)
        self._layers = []
        self.arena.seated = weakref.ref(self)

    @in_turn
    def leave(self) -> None:
        """Move keys and values out of the arena, to tensors of their size."""
        if self.arena.seated() is not self:
            return
        self.trim()
        buffers, config = self.arena.buffers(self.batch_size), self.arena.config
        self._layers = []
        for layer, pair in enumerate(zip(buffers.keys, buffers.values, strict=True)):
            window = config.layer_shape(layer).window
            size = self._num_slots if window is None else min(self._num_slots, buffers.keep)
            keys, values = (x[:, :, :size].clone(memory_format=torch.contiguous_format) for x in pair)
            self._layers.append(LayerCache(keys, values, window, None if window is None else buffers.keep))
        self.arena.seated = lambda: None

    @in_turn
    def extend(self, num_new: int, counts: Tensor | None) -> None:
        """Commit tokens that a forward wrote to the tail: all `num_new`, or the first `counts` (B,) of each row."""
        buffers = self.arena.buffers(self.batch_size)
        if counts is None:
            buffers.counters.add_(num_new)
            self._lengths = self._lengths + num_new
            self._num_slots += num_new
        else:
            self._lengths = self._lengths + counts
            buffers.window_lengths.add_(counts)
            buffers.lengths.copy_(self._lengths)
            self._num_slots = int(self._lengths.max())
        self.num_held += num_new
        self._num_seen += num_new
        self.ragged = self.ragged or counts is not None

    @in_turn
    def trim(self) -> None:
        """In the arena, drop all but the newest tokens of sliding layers, and move these to the front."""
        if self.arena.seated() is self and self.num_held > self.arena.keep:
            self.arena.capture_trim(self.batch_size).rewrite()
            self.num_held = self.arena.keep

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` in total, so that appending up to there never copies."""
        self.make_room(self.num_postponed, max(0, num_tokens - self.num_slots))

    clone, select = in_turn(PrefixCache.clone), in_turn(PrefixCache.select)
    splice = in_turn(PrefixCache.splice)

    def _rebuild(self, transform: Callable[[Tensor], Tensor]) -> Self:
        copy = super()._rebuild(transform)
        copy.arena = self.arena
        return copy
