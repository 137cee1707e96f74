"""The prefix cache in buffers with constant addresses, so that a CUDA graph captured over them stays valid.

As in `dgemma.model.cache.PrefixCache`, rows are left-aligned and lengths are on the device. A forward writes the keys
and values of its tokens into a tail after the prefix, and a commit only adds to a length. Full layers have room for the
whole prefix, sliding layers for their window and a tail. `trim` moves the newest tokens of a sliding layer to its
front. Buffers grow in steps. They return to a pool, with their graphs, when their cache is gone.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import torch
import triton
from torch import Tensor

from dgemma.model.cache import CacheMark, LayerCache, PrefixCache, drop_later
from dgemma.model.config import Conventions, ModelConfig
from dgemma_kernels.engine.graphs import GraphMemory, Replay, Turn, in_turn, remembered, use_here
from dgemma_kernels.engine.prediction import LogitsBuffers
from dgemma_kernels.ops.prefix.kernel import forget

_SMALLEST = 1024  # fewest slots of a full layer
_LINEAR = 16_384  # numbers of slots are powers of two up to this one, then its multiples
_LEAST_TAIL = 8192  # tokens of the smallest tail, over all rows; larger tails have 2, 4, 8 ... times as many
_GAP = 64  # zeros before a sliding layer's first slot, which a tile of `attention` may read but no token sees
_FREE_SHARE = 1 / 8  # share of a GPU's memory that a pool may keep in unused buffers and in logits
_MOST_FREE = 16  # limit of a pool's unused buffers: their graphs use memory that the share does not count


class CacheBuffers:
    """Keys and values of every layer, (B, K, capacity, H) each; the device's counters; graphs captured over them."""

    def __init__(
        self, config: ModelConfig, batch_size: int, capacity: int, tail: int, keep: int, where: dict[str, Any]
    ) -> None:
        self.size = (batch_size, capacity, tail)
        self.keep, self.window_capacity = keep, keep + tail
        self.keys: list[Tensor] = [torch.empty(0)] * config.num_hidden_layers
        self.values: list[Tensor] = [*self.keys]
        self.sliding: Tensor | None = None  # keys and values of all sliding layers: (2, layers, B, K, slots + _GAP, H)
        for kind in set(config.layer_types):
            layers = [layer for layer, its_kind in enumerate(config.layer_types) if its_kind == kind]
            shape = config.layer_shape(layers[0])
            slots = capacity if shape.window is None else self.window_capacity
            gap = 0 if shape.window is None else _GAP
            size = (2, len(layers), batch_size, shape.num_key_value_heads, slots + gap, shape.head_dim)
            both = torch.empty(size, **where)
            both[..., slots:, :] = 0.0
            for at, layer in enumerate(layers):
                self.keys[layer], self.values[layer] = both[:, at, ..., :slots, :]
            if shape.window is not None:
                self.sliding = both
        self.counters = torch.zeros(2, batch_size, dtype=torch.int64, device=where["device"])
        self.lengths, self.window_lengths = self.counters  # tokens of each row; those that a sliding layer still has
        self.graphs: OrderedDict[Any, Any] = OrderedDict()
        self._last_read: Any = None
        self._times_read = 0

    def count_read(self, shape: Any) -> int:
        """Note a forward over tokens of this shape. Return how many consecutive forwards had it, this one included."""
        self._times_read = self._times_read + 1 if shape == self._last_read else 1
        self._last_read = shape
        return self._times_read

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys, *self.values))


def memory_of(device: torch.device) -> int:
    """Return the bytes of a GPU's memory, or 32 GiB on another device."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 32 << 30


class BufferPool:
    """Makes the cache buffers of one model, and keeps unused ones up to a bound, newest first."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        conventions: Conventions,
        dtype: torch.dtype,
        most_read: int,
        memory: GraphMemory,
        logits: LogitsBuffers,
    ) -> None:
        self.config, self.memory, self.device, self.turn = config, memory, memory.device, memory.turn
        self.most_read = most_read  # tokens of one forward, over all rows
        self.keep = config.sliding_window - (0 if conventions.sliding_prefix == "window" else 1)
        self._where: dict[str, Any] = {"device": self.device, "dtype": dtype}
        self._free: list[CacheBuffers] = []
        self._returned: deque[CacheBuffers] = deque()
        self._sorting = threading.Lock()
        self._most_free, self._logits = int(memory_of(self.device) * _FREE_SHARE), logits

    def prefill_len(self, batch_size: int) -> int:
        """Tokens per row that one forward reads: as many as allowed, because they share one read of the weights."""
        return max(self.config.canvas_length, self.most_read // max(batch_size, 1))

    def take(self, batch_size: int, num_slots: int, tail: int) -> CacheBuffers:
        """Return buffers for `num_slots` tokens per row, of which up to `tail` are new."""
        two_canvases = 2 * self.config.canvas_length  # a finished one that is not read yet, and one being denoised
        most = self.prefill_len(batch_size)
        room = max(two_canvases, min(most, _LEAST_TAIL // max(batch_size, 1)))
        while room < min(tail, most):
            room = min(2 * room, most)
        size = (batch_size, _step_up(num_slots), max(tail, room))
        with self._sorting:
            self._sort()
            for at in reversed(range(len(self._free))):
                if self._free[at].size == size:
                    buffers = self._free.pop(at)
                    use_here(*buffers.keys, *buffers.values, buffers.counters)
                    return buffers
        return CacheBuffers(self.config, *size, self.keep, self._where)

    def give_back(self, buffers: CacheBuffers) -> None:
        """Take back the buffers of a cache. Python may collect the cache in any thread, so this never waits."""
        self._returned.append(buffers)
        if self._sorting.acquire(blocking=False):
            try:
                self._sort()
            finally:
                self._sorting.release()

    def _sort(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        while len(self._free) > 1 and (len(self._free) > _MOST_FREE or self._num_bytes() > self._most_free):
            self._free.pop(0)

    def _num_bytes(self) -> int:
        """Memory of the unused buffers and of all logits. The logits of a buffer are freed with its graphs."""
        return self._logits.num_bytes + sum(free.num_bytes for free in self._free)


class FusedCache:
    """A `dgemma.model.cache.Cache` over pooled buffers, made and extended only by the fused denoiser.

    A finished block may be `postponed`: it counts as read, but the engine reads it together with the next canvas, in
    one pass over the weights. If other code needs the cache first, `catch_up` reads the block.
    """

    def __init__(self, pool: BufferPool, batch_size: int) -> None:
        self.pool = pool
        self._buffers: CacheBuffers | None = None
        self._lengths = torch.zeros(batch_size, dtype=torch.int64, device=pool.device)  # without postponed tokens
        self._num_slots = 0
        self._num_seen = 0
        self.postponed: Tensor | None = None  # (B, C) tokens
        self._read: Callable[[Tensor, FusedCache], None] | None = None
        self.num_held = 0  # the most tokens a row has in a sliding layer's buffer, as far as the host knows
        self.ragged = False
        self._marks: list[CacheMark] = []

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(lengths={self.lengths.tolist()}, num_layers={self.pool.config.num_hidden_layers})"
        )

    def __del__(self) -> None:
        buffers = getattr(self, "_buffers", None)
        if buffers is not None:
            self.pool.give_back(buffers)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.clone()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "FusedCache must not be pickled or copied, because its buffers belong to its denoiser. Keep its tokens, "
            "and encode them again; clone() makes a copy for the same denoiser."
        )

    @property
    def buffers(self) -> CacheBuffers:
        if self._buffers is None:
            self.make_room(self.pool.config.canvas_length)
        assert self._buffers is not None
        return self._buffers

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row, (B,) int64: a new tensor at every change, so earlier ones keep their values."""
        return self._lengths if self.postponed is None else self._lengths + self.num_postponed

    @property
    def turn(self) -> Turn:
        return self.pool.turn

    @property
    def batch_size(self) -> int:
        return self._lengths.shape[0]

    @property
    def num_bytes(self) -> int:
        """Memory of the keys and values, in bytes."""
        return self.buffers.num_bytes

    @property
    def num_slots(self) -> int:
        return self._num_slots + self.num_postponed

    @property
    def num_seen(self) -> int:
        return self._num_seen + self.num_postponed

    @property
    def num_postponed(self) -> int:
        """Tokens per row that count as read but are not."""
        return 0 if self.postponed is None else self.postponed.shape[1]

    def postpone(self, tokens: Tensor, read: Callable[[Tensor, "FusedCache"], None]) -> None:
        """Count tokens (B, C) as read; `read(tokens, cache)` is called when they are needed."""
        self.catch_up()
        self.postponed, self._read = tokens.clone(), read

    def take_postponed(self) -> Tensor | None:
        """Return the postponed tokens (B, C), which the caller must read; None if there are none."""
        tokens, self.postponed = self.postponed, None
        return tokens

    @in_turn
    def catch_up(self) -> None:
        """Read the postponed tokens."""
        num_slots, tokens = self._num_slots, self.take_postponed()
        if tokens is None:
            return
        assert self._read is not None
        try:
            self._read(tokens, self)
        except BaseException:
            if self._num_slots == num_slots:
                self.postponed = tokens  # they were not read, so they stay postponed
            raise

    @property
    def layers(self) -> list[LayerCache]:
        """The keys and values of every layer, after reading the postponed tokens."""
        with self.turn:
            self.catch_up()
            self.trim()
        shapes = [self.pool.config.layer_shape(layer) for layer in range(self.pool.config.num_hidden_layers)]
        return [
            LayerCache(keys, values, shape.window, None if shape.window is None else self.pool.keep)
            for keys, values, shape in zip(self.buffers.keys, self.buffers.values, shapes, strict=True)
        ]

    @in_turn
    def make_room(self, num_new: int, num_later: int = 0) -> CacheBuffers:
        """Return buffers with room for `num_new` tokens per row, and for `num_later` more in full layers."""
        old, num_slots = self._buffers, self._num_slots + num_new + num_later
        if old is not None and self.num_held + num_new > old.window_capacity:
            self.trim()
        if old is not None and num_slots <= old.size[1] and num_new <= old.size[2]:
            return old
        self.trim()
        self._move_to(self.pool.take(self.batch_size, num_slots, num_new))
        if old is not None:
            self.pool.give_back(old)
        return self.buffers

    @in_turn
    def extend(self, num_new: int, counts: Tensor | None) -> None:
        """Commit tokens that a forward wrote to the tail: all `num_new`, or the first `counts` (B,) of each row."""
        if counts is None:
            self.buffers.counters.add_(num_new)
            self._lengths = self._lengths + num_new
            self._num_slots += num_new
        else:
            grown = self._lengths + counts
            self.buffers.window_lengths.add_(counts)
            self._set_lengths(grown)
            self._num_slots = int(grown.max())
        self.num_held += num_new
        self._num_seen += num_new
        self.ragged = self.ragged or counts is not None

    @in_turn
    def trim(self) -> None:
        """Drop all but the newest tokens of sliding layers, and move these to the front."""
        buffers = self._buffers
        if buffers is None or self.num_held <= buffers.keep:
            return

        def run() -> None:  # a second run does nothing, so capture may run it twice
            if buffers.sliding is not None:
                forget(buffers.sliding[0], buffers.sliding[1], buffers.window_lengths, buffers.keep)
            buffers.window_lengths.clamp_(max=buffers.keep)

        remembered(buffers.graphs, "trim", lambda: Replay(run, self.pool.memory)).replay()
        self.num_held = buffers.keep

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` in total, so that appending up to there never copies."""
        self.make_room(self.num_postponed, max(0, num_tokens - self.num_slots))

    @in_turn
    def mark(self) -> CacheMark:
        """Remember this boundary, to roll back to it later; copies the tokens of sliding layers."""
        windows = [
            None if layer.keep is None else tuple(view.clone() for view in layer.view(self.num_slots))
            for layer in self.layers
        ]
        mark = CacheMark(self.lengths, self.num_slots, self.num_seen, self.ragged, windows)  # type: ignore[arg-type]
        self._marks.append(mark)
        return mark

    @in_turn
    def rollback(self, mark: CacheMark) -> None:
        """Forget everything after `mark`, and later marks. This mark can be used again."""
        drop_later(self._marks, mark)
        self.take_postponed()
        self._num_slots, self._num_seen, self.ragged = mark.num_slots, mark.num_seen, mark.ragged
        for layer, window in zip(self.layers, mark.windows, strict=True):
            if window is not None:
                for target, source in zip((layer.keys, layer.values), window, strict=True):
                    target[:, :, : source.shape[2]] = source
        self._hold(mark.lengths)

    @in_turn
    def clone(self) -> Self:
        return self._rebuild(lambda tensor: tensor)

    @in_turn
    def select(self, rows: Tensor) -> Self:
        return self._rebuild(lambda tensor: tensor.index_select(0, rows))

    @in_turn
    def splice(self, rows: Tensor, donor: "FusedCache") -> None:
        """Replace `rows` (R,) in place by the rows of a donor of batch size R. Marks are forgotten."""
        self.catch_up()
        theirs = donor.layers  # reads postponed tokens and trims
        self.trim()
        lengths = self._lengths.index_copy(0, rows, donor._lengths)
        self.make_room(self.pool.config.canvas_length, max(0, donor._num_slots - self._num_slots))
        for mine, layer in zip(self.layers, theirs, strict=True):
            size = layer.num_filled(donor._num_slots)
            mine.keys[rows, :, :size], mine.values[rows, :, :size] = layer.keys[:, :, :size], layer.values[:, :, :size]
        self._num_slots, self._num_seen = int(lengths.max()), max(self._num_seen, donor._num_seen)
        self.ragged, self._marks = True, []
        self._hold(lengths)

    @classmethod
    def join(cls, parts: Sequence[tuple[Tensor, Any]]) -> Self:
        """Join caches into one. A part is row numbers (R,) and their cache; together the parts cover the batch."""
        pool: BufferPool = parts[0][1].pool
        with pool.turn:
            joined = PrefixCache.join(parts)
            fused = cls(pool, joined.batch_size)
            fused._num_slots, fused._num_seen, fused.ragged = joined.num_slots, joined.num_seen, True
            fused.make_room(pool.config.canvas_length)
            for target, layer in zip(fused.layers, joined.layers, strict=True):
                size = layer.keys.shape[2]
                target.keys[:, :, :size], target.values[:, :, :size] = layer.keys, layer.values
            fused._hold(joined.lengths)
        return fused

    def _rebuild(self, transform: Callable[[Tensor], Tensor]) -> Self:
        self.catch_up()
        self.trim()
        lengths = transform(self._lengths)
        copy = type(self)(self.pool, lengths.shape[0])
        copy._lengths = lengths.clone()
        copy._num_slots, copy._num_seen = self._num_slots, self._num_seen
        copy.ragged, copy.num_held = self.ragged, self.num_held
        if self._buffers is not None:
            # `trim` has emptied the tail, so the copy has the smallest one. A long tail takes memory in every row.
            copy._buffers = self.pool.take(lengths.shape[0], self._buffers.size[1], tail=0)
            copy._copy_from(self._buffers, transform)
        return copy

    def _move_to(self, buffers: CacheBuffers) -> None:
        old, self._buffers = self._buffers, buffers
        try:
            if old is None:
                self._hold(self._lengths)
            else:
                self._copy_from(old, lambda tensor: tensor)
        except BaseException:
            self._buffers = old  # the new ones are incomplete
            raise

    def _copy_from(self, old: CacheBuffers, transform: Callable[[Tensor], Tensor]) -> None:
        assert self._buffers is not None
        for layer in range(self.pool.config.num_hidden_layers):
            sliding = self.pool.config.layer_shape(layer).window is not None
            size = self.num_held if sliding else self._num_slots
            for target, source in (
                (self._buffers.keys[layer], old.keys[layer]),
                (self._buffers.values[layer], old.values[layer]),
            ):
                target[:, :, :size] = transform(source[:, :, :size])
        self._hold(self._lengths)

    def _hold(self, lengths: Tensor) -> None:
        """Set the counters to what they are after `trim`, for rows of `lengths` tokens."""
        self.num_held = min(self._num_slots, self.pool.keep)
        self.buffers.window_lengths.copy_(lengths.clamp(max=self.pool.keep))
        self._set_lengths(lengths)

    def _set_lengths(self, lengths: Tensor) -> None:
        self._lengths = lengths
        self.buffers.lengths.copy_(lengths)


def _step_up(num_slots: int) -> int:
    if num_slots > _LINEAR:
        return triton.cdiv(num_slots, _LINEAR) * _LINEAR
    return max(_SMALLEST, triton.next_power_of_2(num_slots))
