"""The engine's prefix cache, and the static tensors over which all of its forwards run.

A CUDA graph stays valid only over constant addresses. So there is one `Arena` per denoiser, and every graph is captured
over it. A cache is in the arena while a forward uses it. When another cache needs the arena, its keys and values move
to tensors of their exact size, where they are those of a `dgemma.model.cache.PrefixCache`. So any number of caches
share the graphs, and a cache at rest takes no more memory than its tokens.

In the arena, a forward writes the keys and values of its tokens into a tail after the prefix, and a commit only adds to
a length. `trim` moves the newest tokens of a sliding layer to its front. In a forward of many tokens, all sliding
layers share one long tail (`CacheBuffers.layer`), because a tail for each would take 1.7 GB in the published model.
"""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NoReturn, Self

import torch
from torch import Tensor

from dgemma.model.cache import LayerCache, PrefixCache
from dgemma.model.diffusion import DiffusionGemma
from dgemma_kernels.engine.graphs import GraphMemory, Graphs, Replay, Turn, copy_all, in_turn, use_here

_LEAST_SLOTS = 16_384  # of full layers, over all rows
_GROWTH = 1.5  # of tensors that are too small, because their graphs are captured again
_GAP = 64  # slots around a sliding layer's rows, which a tile of `attention` may read but no token sees
_ROWS = 16  # counters come in multiples of it, so that both begin at a multiple of 16 bytes

_Kind = Literal["full", "sliding", "shared"]  # of layers; "shared" is a place that all sliding layers use in turn


class CacheBuffers:
    """The arena for a batch of B rows: keys and values of every layer, (2, B, K, capacity, H), and counters."""

    def __init__(self, arena: "Arena", batch_size: int) -> None:
        self.keep, self.tail, self._sliding = arena.keep, arena.tail, frozenset(arena.layers.get("sliding", ()))
        self.layers: list[Tensor] = [torch.empty(0)] * arena.config.num_hidden_layers
        for kind, memory in arena.tensors.items():
            layers, (slots, gap) = arena.layers[kind], arena.sizes(kind, batch_size, arena.capacity(batch_size))
            shape = arena.config.layer_shape(layers[0])
            size = (2, len(layers), batch_size, shape.num_key_value_heads, slots + gap, shape.head_dim)
            both = memory[gap * shape.head_dim :][: math.prod(size)].view(size)[..., :slots, :]
            if kind == "shared":
                self._shared = both[:, 0]
                continue
            for at, layer in enumerate(layers):
                self.layers[layer] = both[:, at]
        self.counters = arena.counters[:, :batch_size]
        self.lengths, self.window_lengths = self.counters  # tokens of each row; those that a sliding layer still has
        self.newest = self._find_newest()

    @contextmanager
    def layer(self, index: int, num_new: int) -> Iterator[Tensor]:
        """Yield keys and values of a layer, (2, B, K, slots, H), for a forward of `num_new` tokens per row.

        A sliding layer with a shorter tail uses the shared memory, with its window. Then it takes back the slots that
        `keep_newest` chose before the forward.
        """
        own = self.layers[index]
        if num_new <= self.tail or index not in self._sliding:
            yield own
            return
        _front(self._shared, self.keep).copy_(_front(own, self.keep))
        yield self._shared
        move(self._shared, own, self.newest)

    def keep_newest(self, num_new: Tensor | int) -> None:
        """Choose the slots that a forward with shared memory keeps, after `num_new` more tokens: each row's newest."""
        self.newest.copy_(self._find_newest(num_new))

    def trim(self) -> None:
        """Move the newest tokens of sliding layers to their front. Layers take turns, to save memory."""
        slots = self._find_newest()
        for layer in self._sliding:
            move(self.layers[layer], self.layers[layer], slots)
        self.window_lengths.clamp_(max=self.keep)

    def _find_newest(self, num_new: Tensor | int = 0) -> Tensor:
        """Return the slots of each row's last `keep` tokens, (B, 1, keep, 1)."""
        shift = (self.window_lengths + num_new - self.keep).clamp(min=0)
        return shift[:, None, None, None] + torch.arange(self.keep, device=shift.device)[:, None]


class Arena:
    """The static tensors of one denoiser's caches. Batches of all sizes share the memory, and one cache uses it.

    `graphs`, of all forwards, are captured over them. They are dropped when the tensors are replaced by larger ones.
    """

    def __init__(self, model: DiffusionGemma, most_read: int, memory: GraphMemory, graphs: Graphs) -> None:
        config, dtype = self.config, self.dtype = model.config, model.dtype
        self.conventions, self.memory, self.graphs = model.conventions, memory, graphs
        self.device, self.turn = memory.device, memory.turn
        self.most_read = most_read  # tokens of one forward, over all rows
        self.keep = config.sliding_window - (0 if model.conventions.sliding_prefix == "window" else 1)
        self.layers: dict[_Kind, list[int]] = {}
        for layer in range(config.num_hidden_layers):
            self.layers.setdefault("full" if config.layer_shape(layer).window is None else "sliding", []).append(layer)
        if "sliding" in self.layers:
            self.layers["shared"] = self.layers["sliding"][:1]
        self.tensors = {kind: torch.empty(0, dtype=dtype, device=self.device) for kind in self.layers}
        self.counters = torch.zeros(2, 0, dtype=torch.int64, device=self.device)
        self.tail = 2 * config.canvas_length  # a finished canvas that is not read yet, and one being denoised
        self._buffers: dict[int, CacheBuffers] = {}
        self.seated: Callable[[], FusedCache | None] = lambda: None  # the cache whose keys and values are here

    def prefill_len(self, batch_size: int) -> int:
        """Tokens per row that one forward reads: as many as allowed, because they share one read of the weights."""
        return max(self.config.canvas_length, self.most_read // max(batch_size, 1))

    def capacity(self, batch_size: int) -> int:
        """Tokens per row for which full layers have room."""
        if "full" not in self.tensors:
            return 1 << 62
        return self.tensors["full"].numel() // max(self._values_per_slot("full") * batch_size, 1) // _GAP * _GAP

    def sizes(self, kind: _Kind, batch_size: int, capacity: int) -> tuple[int, int]:
        """Return the slots per row in a layer, `capacity` in full layers, and the slots around them."""
        if kind == "full":
            return capacity, 0
        return self.keep + max(self.tail, self.prefill_len(batch_size) if kind == "shared" else 0), _GAP

    def buffers(self, batch_size: int) -> CacheBuffers:
        if batch_size not in self._buffers:
            self._buffers[batch_size] = CacheBuffers(self, batch_size)
        return self._buffers[batch_size]

    def has_room(self, batch_size: int, num_slots: int, num_new: int) -> bool:
        """Return True if the tensors fit B rows of `num_slots` tokens, of which up to `num_new` are new."""
        return (
            batch_size <= self.counters.shape[1]
            and num_slots <= self.capacity(batch_size)
            and num_new <= self.tail
            and all(self._needs(kind, batch_size, 0) <= tensor.numel() for kind, tensor in self.tensors.items())
        )

    @in_turn
    def make_room(self, batch_size: int, num_slots: int, num_new: int) -> None:
        """Replace tensors that are too small, and drop all graphs. The cache in the arena leaves it first."""
        if self.has_room(batch_size, num_slots, num_new):
            return
        if (seated := self.seated()) is not None:
            seated.leave()
        use_here(*(buffers.newest for buffers in self._buffers.values()))
        self._buffers.clear()
        self.graphs.clear()
        self.tail = max(self.tail, num_new)
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
        run = self.buffers(batch_size).trim  # a second run does nothing, so capture may run it twice
        return self.graphs.remembered(("trim", batch_size), partial(Replay, run, self.memory))

    def _values_per_slot(self, kind: _Kind) -> int:
        shape = self.config.layer_shape(self.layers[kind][0])
        return 2 * len(self.layers[kind]) * shape.num_key_value_heads * shape.head_dim

    def _needs(self, kind: _Kind, batch_size: int, capacity: int) -> int:
        """Return how many values B rows take, with `capacity` slots in full layers."""
        slots, gap = self.sizes(kind, batch_size, capacity)
        before = gap * self.config.layer_shape(self.layers[kind][0]).head_dim
        return batch_size * (slots + gap) * self._values_per_slot(kind) + before


def move(source: Tensor, target: Tensor, slots: Tensor) -> None:
    """Copy the tokens in `slots` (B, 1, keep, 1) of a layer, (2, B, K, slots, H), to the front of it or another.

    Example: `move(layer, layer, slots)`.
    """
    front = _front(target, slots.shape[2])
    front.copy_(source.view(torch.int64).gather(3, slots.expand_as(front)))


def _front(layer: Tensor, num_slots: int) -> Tensor:
    return layer.view(torch.int64)[..., :num_slots, :]  # words of 8 bytes are copied faster


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
    def make_room(self, num_new: int, num_later: int = 0, *, shared: bool = False) -> CacheBuffers:
        """Enter the arena, with room for `num_new` tokens per row, and for `num_later` more in full layers.

        If `shared`, sliding layers may share the memory for new tokens, of which a row has at most `prefill_len`.
        """
        arena, batch = self.arena, self.batch_size
        in_tail = 0 if shared and num_new <= arena.prefill_len(batch) else num_new
        arena.make_room(batch, self._num_slots + num_new + num_later, in_tail)
        buffers = arena.buffers(batch)
        if (seated := arena.seated()) is not self:
            if seated is not None:
                seated.leave()
            self._enter(buffers)
        if self.num_held + num_new > buffers.keep + buffers.tail:
            self.trim()
        return buffers

    def _enter(self, buffers: CacheBuffers) -> None:
        filled = [layer.num_filled(self._num_slots) for layer in self._layers]
        sources = [tensor for layer in self._layers for tensor in (layer.keys, layer.values)]
        use_here(self._lengths, *sources)
        targets = [tensor for pair in buffers.layers for tensor in pair]
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
        for layer, pair in enumerate(buffers.layers):
            window = config.layer_shape(layer).window
            size = self._num_slots if window is None else min(self._num_slots, buffers.keep)
            keys, values = (x[:, :, :size].clone(memory_format=torch.contiguous_format) for x in pair)
            self._layers.append(LayerCache(keys, values, window, None if window is None else buffers.keep))
        self.arena.seated = lambda: None

    @in_turn
    def extend(self, num_new: int, counts: Tensor | None, *, shared: bool = False) -> None:
        """Commit tokens that a forward wrote to the tail: all `num_new`, or the first `counts` (B,) of each row.

        If sliding layers `shared` the tail, they have taken the newest tokens back.
        """
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
        if shared:
            buffers.window_lengths.clamp_(max=buffers.keep)
            self.num_held = min(self.num_held, buffers.keep)
        self._num_seen += num_new
        self.ragged = self.ragged or counts is not None

    @in_turn
    def trim(self) -> None:
        """In the arena, drop all but the newest tokens of sliding layers, and move these to the front."""
        if self.arena.seated() is self and self.num_held > self.arena.keep:
            self.arena.capture_trim(self.batch_size).replay()
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
