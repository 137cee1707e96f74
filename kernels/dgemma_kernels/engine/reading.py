"""Reads prompts and single tokens causally into a prefix cache, in CUDA graphs.

Every forward is captured, and reads one of a few numbers of tokens per row. A prompt is cut into chunks of such sizes,
and the last one is padded.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from dgemma.model.causal import CausalRule, CausalState
from dgemma.model.vision.images import Images
from dgemma.model.vision.places import find_blocks, insert_features, split_tokens
from dgemma_kernels.engine.cache import Arena, CacheBuffers, FusedCache
from dgemma_kernels.engine.graphs import Captured, Replay, copy_all, side_stream
from dgemma_kernels.engine.prediction import FusedPrediction, Logits
from dgemma_kernels.engine.workspace import Workspace
from dgemma_kernels.ops.draws import kernel as draws

MOST_READ = 8192  # tokens of a forward, over all rows
MOST_READ_FOUR_BIT = 1024  # users choose weights of four bits to save memory
_SIZES = (16, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)  # tokens per row
_COST = 600  # a forward takes as long as this number of tokens and its own


def read_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of tokens per row that a forward of at most `most` reads, smallest first.

    Example: `read_sizes(512)` is (16, 64, 128, 256, 512).
    """
    return tuple(size for size in _SIZES if size <= most) or (most,)


@lru_cache(maxsize=4096)
def plan_chunks(num_tokens: int, batch_size: int, most: int) -> tuple[int, ...]:
    """Return the sizes of the forwards that read `num_tokens` tokens per row. The last one may be padded.

    Example: `plan_chunks(4400, 1, 8192)` is (4096, 512), and `plan_chunks(5800, 1, 8192)` is (6144,).
    """
    if num_tokens == 0:
        return ()
    sizes = read_sizes(most)
    whole: tuple[int, ...] = ()
    if num_tokens > sizes[-1]:
        whole = (sizes[-1],) * ((num_tokens - 1) // sizes[-1])
        num_tokens -= sum(whole)
    smaller = [size for size in sizes if size < num_tokens]
    padded = sizes[len(smaller) : len(smaller) + 1]
    if not smaller:
        return whole + padded
    in_parts = (smaller[-1], *plan_chunks(num_tokens - smaller[-1], batch_size, most))
    return whole + min(padded, in_parts, key=lambda chunks: len(chunks) * _COST + batch_size * sum(chunks))


class CausalReader:
    """Reads tokens into the caches of one denoiser. `before_graph` is called before a graph is captured or replayed."""

    def __init__(self, workspace: Workspace, arena: Arena, before_graph: Callable[[], None]) -> None:
        self._workspace, self._arena, self._before_graph = workspace, arena, before_graph

    def read(
        self, tokens: Tensor, cache: FusedCache, real: Tensor | None, *, last: bool, images: Images | None = None
    ) -> Tensor | None:
        """Run tokens (B, T) chunk by chunk, and commit them → the last hidden state (B, T, D) if `last`."""
        place, counts = None, None
        if real is not None:
            # A row's real tokens come first. Padding is written after its prefix and never counted.
            counts = real.sum(1)
            place = torch.where(real, real.cumsum(1), counts[:, None] + (~real).cumsum(1)) - 1
            tokens = torch.empty_like(tokens).scatter(1, place, tokens)
        num_new, most = tokens.shape[1], self._arena.prefill_len(tokens.shape[0])
        hidden, inputs, chunks = [], [tokens], list(_cut(num_new, plan_chunks(num_new, tokens.shape[0], most)))
        if images is not None:
            assert self._workspace.vision is not None
            blocks = find_blocks(tokens, images, self._workspace.config.image_token_id)
            chunks = list(split_tokens(num_new, most, blocks))
            # The host no longer waits for the device from here on, because the vision tower takes long.
            self._before_graph()
            embedded = self._workspace.forward.embed_prompt(tokens.long())
            inputs = [blocks + 1, insert_features(embedded, self._workspace.vision(images), blocks)]
        for chunk in chunks:
            num_slots = num_new - chunk.start + self._workspace.config.canvas_length
            left = None if counts is None else (counts - chunk.start).clamp(0, chunk.stop - chunk.start)
            hidden.append(self._read_chunk([x[:, chunk] for x in inputs], left, cache, num_slots, last))
        if not last:
            return None
        no_tokens = self._workspace.new_hidden(tokens.shape[0], 0)
        joined = torch.cat([no_tokens, *hidden], dim=1)
        return joined if place is None else joined.gather(1, place[..., None].expand_as(joined))

    def read_token(self, tokens: Tensor, cache: FusedCache) -> Tensor:
        """Take one autoregressive step, with the head in the same graph: (B, 1) → (B, 1, V) float32."""
        buffers = cache.make_room(1, self._workspace.config.canvas_length)
        self._before_graph()
        logits = self.capture([tokens], buffers, last=True, head=True)([tokens]).clone()
        cache.extend(1, None)
        return logits[:, None]

    def draw_token(self, state: CausalState, cache: FusedCache, rule: CausalRule) -> CausalState:
        """Read the last token of each row and draw the next one, in one graph."""
        buffers = cache.make_room(1, self._workspace.config.canvas_length)
        self._before_graph()
        make = partial(CapturedCausalStep, self._workspace, state, rule, buffers)
        after = self._workspace.graphs.remembered(("causal", rule, state.token.shape), make)(state)
        cache.extend(1, None)
        return after

    def _read_chunk(
        self, inputs: list[Tensor], counts: Tensor | None, cache: FusedCache, num_slots: int, last: bool
    ) -> Tensor:
        """Run one chunk (B, T) into the cache, and commit the first `counts` tokens of each row → (B, T, D) if `last`.

        `inputs` are its tokens, or for a prompt with images the numbers of images and the embeddings (`Forward.read`).

        The cache gets room for `num_slots` more tokens per row: the chunk, the rest of the prompt, and a canvas.
        Padding is after the chunk in a causal forward, so it changes no other token.
        """
        batch, size = inputs[0].shape
        padded_size = next((s for s in read_sizes(self._arena.prefill_len(batch)) if s >= size), size)
        buffers = cache.make_room(padded_size, max(0, num_slots - padded_size), shared=True)
        inputs = [nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, padded_size - size)) for x in inputs]
        self._before_graph()
        captured = self.capture(inputs, buffers, last)
        if is_shared := padded_size > buffers.tail:
            buffers.keep_newest(size if counts is None else counts)
        hidden = captured(inputs)
        cache.extend(size, counts, shared=is_shared)  # at once, because shared windows have moved
        return hidden.view(batch, padded_size, -1)[:, :size].clone() if last else hidden

    def capture(self, inputs: list[Tensor], buffers: CacheBuffers, last: bool = False, head: bool = False) -> Captured:
        """Return the graph of a forward over tokens (B, T), or numbers of images and embeddings.

        Its result is the last hidden state if `last`, or logits if also `head`.
        """
        workspace, (tokens, *embedded) = self._workspace, inputs

        def run(tokens: Tensor, embedded: Tensor | None = None) -> Tensor:
            hidden = workspace.forward.read(tokens, buffers, last=last, embedded=embedded)
            if not last:  # only keys and values matter
                return hidden.new_empty(0)
            return workspace.causal_logits(hidden) if head else hidden

        def make() -> Captured:
            buffers.keep_newest(0)  # so that a run before the first call moves no window
            captured = Captured(run, [tokens.long(), *embedded], workspace.memory, workspace.forward.rehearsal)
            if tokens.shape[1] > buffers.tail:
                captured.graph.mark_stale()
            return captured

        return workspace.graphs.remembered(("token" if head else "read", tokens.shape, last, len(inputs)), make)


def _cut(num_tokens: int, sizes: tuple[int, ...]) -> Iterator[slice]:
    """Yield chunks of these sizes, the last of which ends after `num_tokens` tokens."""
    start = 0
    for size in sizes:
        yield slice(start, min(start + size, num_tokens))
        start += size


class CapturedCausalStep:
    """One autoregressive token over static tensors: forward, head, draw and stop test."""

    def __init__(self, workspace: Workspace, state: CausalState, rule: CausalRule, buffers: CacheBuffers) -> None:
        self._inputs = {name: x.clone() for name, x in _fields(state).items()}
        static, forward = CausalState(**self._inputs), workspace.forward
        no_block = self._no_block = torch.zeros_like(static.seeds)  # kept, because the graph reads its memory

        def predict() -> FusedPrediction:
            logits = forward.head(forward.read(static.token, buffers, last=True))
            return FusedPrediction(Logits(logits.unflatten(0, static.token.shape)), (workspace.softcap,))

        def run() -> dict[str, Tensor]:
            with side_stream(no_block.device, forward.sides) as join:
                uniform = draws.uniform(static.seeds, no_block, static.number, 1, "token")
            prediction = predict()
            join()
            return _fields(rule.choose(prediction, static, uniform))

        self.graph = Replay(run, workspace.memory, rehearse=forward.rehearsal(run))

    def __call__(self, state: CausalState) -> CausalState:
        copy_all(list(self._inputs.values()), list(_fields(state).values()))
        self.graph.replay()
        after = {name: torch.empty_like(x) for name, x in self.graph.result.items()}
        copy_all(list(after.values()), list(self.graph.result.values()))
        return replace(state, **after)


def _fields(state: CausalState) -> dict[str, Tensor]:
    return {field.name: getattr(state, field.name) for field in fields(CausalState)}
