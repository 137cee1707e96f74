"""Reads prompts and single tokens causally into a prefix cache; a forward whose size repeats becomes a CUDA graph."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dgemma.model.causal import CausalRule, CausalState
from dgemma.model.vision.images import Images
from dgemma.model.vision.places import find_blocks, insert_features, split_tokens
from dgemma_kernels.engine.cache import BufferPool, CacheBuffers, FusedCache
from dgemma_kernels.engine.graphs import Replay, compile_together, copy_all, remembered, side_stream
from dgemma_kernels.engine.prediction import FusedPrediction, Logits
from dgemma_kernels.engine.workspace import Workspace
from dgemma_kernels.ops.draws import kernel as draws

_IN_A_ROW = 3
_MOST_REHEARSED = 4  # rows; for more, the kernels of a step are not compiled together with those of a prompt


@dataclass(frozen=True, kw_only=True)
class ReadLimits:
    """Limits on the tokens of a forward over a prompt, counted over all rows.

    Capture takes tens of milliseconds, and large forwards gain less from it.
    """

    most: int  # largest forward
    captured_soon: int  # largest forward that is captured at its second use
    captured_later: int  # largest forward that is captured after _IN_A_ROW consecutive uses


LIMITS = ReadLimits(most=8192, captured_soon=2048, captured_later=8192)
# Users choose weights of four bits to save memory, so their forwards are smaller.
FOUR_BIT_LIMITS = ReadLimits(most=1024, captured_soon=256, captured_later=256)
_TOKEN_BYTES = 400_000  # of activations and of sliding layers' tails, per token of a forward of the published model
_MEMORY_SHARE = 1 / 8  # of a GPU's memory that a forward may use
_MOST = 32_768


def read_limits(memory: int, *, four_bit: bool) -> ReadLimits:
    """Return the limits for a GPU with this memory in bytes. More tokens per forward leave fewer processors idle.

    Example: `read_limits(80 << 30, four_bit=False).most` is 16,384.
    """
    if four_bit:
        return FOUR_BIT_LIMITS
    fitting = max(int(memory * _MEMORY_SHARE / _TOKEN_BYTES), LIMITS.most)
    return replace(LIMITS, most=min(1 << fitting.bit_length() - 1, _MOST))


class CausalReader:
    """Reads tokens into the caches of one denoiser. `before_graph` is called before a graph is captured or replayed."""

    def __init__(
        self, workspace: Workspace, pool: BufferPool, limits: ReadLimits, before_graph: Callable[[], None]
    ) -> None:
        self._workspace, self._pool, self.limits, self._before_graph = workspace, pool, limits, before_graph
        self._shapes_read: set[Any] = set()  # of chunks of a prompt

    def read(
        self, tokens: Tensor, cache: FusedCache, real: Tensor | None, *, last: bool, images: Images | None = None
    ) -> Tensor | None:
        """Run tokens (B, T) chunk by chunk, and commit them → the last hidden state (B, T, D) if `last`."""
        order, counts = None, None
        if real is not None:
            # A row's real tokens come first. Padding is written after its prefix and never counted.
            order = (~real).to(torch.uint8).sort(dim=1, stable=True).indices
            tokens, counts = tokens.gather(1, order), real.sum(1)
        num_new, chunk_len = tokens.shape[1], self._pool.prefill_len(tokens.shape[0])
        hidden, embedded, blocks = [], None, None
        if images is not None:
            embedded, blocks = self._embed_images(tokens, images)
        for chunk in split_tokens(num_new, chunk_len, blocks):
            num_slots = num_new - chunk.start + self._workspace.config.canvas_length
            if embedded is None or blocks is None:
                hidden.append(self._read_chunk(tokens[:, chunk], cache, num_slots, last))
            else:
                hidden.append(self._read_images(embedded[:, chunk], blocks[:, chunk], cache, num_slots, last))
            size = chunk.stop - chunk.start
            cache.extend(size, None if counts is None else (counts - chunk.start).clamp(0, size))
        if not last:
            return None
        no_tokens = self._workspace.new_hidden(tokens.shape[0], 0)
        joined = torch.cat([no_tokens, *hidden], dim=1)
        if order is None:
            return joined
        back = torch.empty_like(order).scatter(1, order, torch.arange(num_new, device=order.device).expand_as(order))
        return joined.gather(1, back[..., None].expand_as(joined))

    def _embed_images(self, tokens: Tensor, images: Images) -> tuple[Tensor, Tensor]:
        """Return embeddings (B, T, D) with the features of images, and the image of each token (B, T)."""
        workspace = self._workspace
        assert workspace.vision is not None
        blocks = find_blocks(tokens, images, workspace.config.image_token_id)
        features = workspace.vision(images.to(workspace.device))
        return insert_features(workspace.forward.embed_prompt(tokens.long()), features, blocks), blocks

    def _read_images(self, embedded: Tensor, blocks: Tensor, cache: FusedCache, num_slots: int, last: bool) -> Tensor:
        """Do what `_read_chunk` does for embeddings (B, T, D) with images. It is never captured."""
        batch, size = blocks.shape
        buffers = cache.make_room(size, max(0, num_slots - size))
        hidden = self._workspace.forward.read_images(embedded, blocks, buffers, last=last)
        return hidden.view(batch, size, -1)

    def read_token(self, tokens: Tensor, cache: FusedCache) -> Tensor:
        """Take one autoregressive step, with the head in the same graph: (B, 1) → (B, 1, V) float32."""
        buffers = cache.make_room(1, self._workspace.config.canvas_length)
        self._before_graph()
        make = partial(CapturedRead, self._workspace, tokens, buffers, last=True, head=True)
        logits = remembered(buffers.graphs, ("token", tokens.shape), make)(tokens)
        cache.extend(1, None)
        return logits[:, None]

    def draw_token(self, state: CausalState, cache: FusedCache, rule: CausalRule) -> CausalState:
        """Read the last token of each row and draw the next one, in one graph."""
        buffers = cache.make_room(1, self._workspace.config.canvas_length)
        self._before_graph()
        make = partial(CapturedCausalStep, self._workspace, state, rule, buffers)
        after: CausalState = remembered(buffers.graphs, ("causal", rule, state.token.shape), make)(state)
        cache.extend(1, None)
        return after

    def _read_chunk(self, tokens: Tensor, cache: FusedCache, num_slots: int, last: bool) -> Tensor:
        """Run one chunk (B, T) into the tail of the cache → (B, T, D) if `last`.

        The cache gets room for `num_slots` more tokens per row: the chunk, the rest of the prompt, and a canvas.

        A captured chunk is padded to one of a few sizes. Padding is after the chunk in a causal forward, so it changes
        no other token.
        """
        batch, size = tokens.shape
        padded_size = min(_round_up(size), self._pool.prefill_len(batch))
        buffers = cache.make_room(padded_size, max(0, num_slots - padded_size))
        key = ("read", (batch, padded_size), last)
        times = buffers.count_read(key)
        num_tokens = batch * padded_size
        is_small = num_tokens <= self.limits.captured_soon
        is_captured = key in buffers.graphs or (times >= _IN_A_ROW and num_tokens <= self.limits.captured_later)
        if is_small or is_captured:
            tokens = nn.functional.pad(tokens, (0, padded_size - size))
        # Forwards of one shape run the same kernels. Large ones of similar sizes do, too.
        shape = tokens.shape if is_small else tokens.numel().bit_length()
        if is_captured or (is_small and shape in self._shapes_read):
            self._before_graph()
            make = partial(CapturedRead, self._workspace, tokens, buffers, last)
            hidden = remembered(buffers.graphs, key, make)(tokens)
        else:
            if shape not in self._shapes_read:
                self._compile(tokens, buffers, last)
            self._shapes_read.add(shape)
            hidden = self._workspace.forward.read(tokens.long(), buffers, last=last)
        return hidden.view(batch, tokens.shape[1], -1)[:, :size]

    def _compile(self, tokens: Tensor, buffers: CacheBuffers, last: bool) -> None:
        """Compile the kernels of a chunk in parallel.

        With the first chunk, the kernels of a canvas are compiled too. This allocates the canvas's logits, 134 MB per
        row for the published model, so large batches do it later.
        """
        if self._workspace.device.type != "cuda":
            return
        with_canvas = not self._shapes_read and tokens.shape[0] <= _MOST_REHEARSED

        def launch() -> None:
            self._workspace.forward.read(tokens.long(), buffers, last=last)
            if with_canvas:
                self._rehearse(buffers)

        compile_together(launch)

    def _rehearse(self, buffers: CacheBuffers) -> None:
        """Launch the kernels of a denoising step on empty tensors, for `compile_together`."""
        workspace = self._workspace
        shape = (buffers.lengths.shape[0], workspace.config.canvas_length)
        canvas = torch.zeros(shape, dtype=torch.int64, device=workspace.device)
        hidden = workspace.forward.canvas(canvas, workspace.soft_embedding(None, canvas), buffers)
        logits = Logits(workspace.forward.head(hidden).unflatten(0, shape))
        raw = FusedPrediction(logits, (workspace.softcap,))
        prediction = raw.shaped(temperature=torch.ones(shape[0], device=workspace.device))
        prediction.sample(torch.zeros(shape, dtype=torch.float64, device=workspace.device))
        workspace.soft_embedding(prediction, canvas)


def _round_up(num_tokens: int) -> int:
    """Return the size to which a chunk is padded: a power of two up to 512, then a multiple of 256."""
    return 1 << (num_tokens - 1).bit_length() if num_tokens <= 512 else -(-num_tokens // 256) * 256


class CapturedRead:
    """A causal forward of a fixed number of tokens, up to the last hidden state or the logits."""

    def __init__(
        self, workspace: Workspace, tokens: Tensor, buffers: CacheBuffers, last: bool, head: bool = False
    ) -> None:
        self._tokens, self._last = tokens.long().clone(), last
        static = self._tokens

        def run() -> Tensor:
            hidden = workspace.forward.read(static, buffers, last=last)
            return workspace.causal_logits(hidden) if head else hidden

        # The first chunk of each size is read without a graph, so kernels are compiled before the capture.
        launches = run if head else None
        self.graph = Replay(run, workspace.memory, launches)

    def __call__(self, tokens: Tensor) -> Tensor:
        self._tokens.copy_(tokens)
        if not self._last:  # only the buffers matter
            self.graph.rewrite()
            return self.graph.result
        self.graph.replay()
        return self.graph.result.clone()


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
            with side_stream(no_block.device) as join:
                uniform = draws.uniform(static.seeds, no_block, static.number, 1, "token")
            prediction = predict()
            join()
            return _fields(rule.choose(prediction, static, uniform))

        # A draw in PyTorch may index by the prediction, which `compile_together` does not compute.
        launches = run if rule.top_k in (None, 1) and rule.top_p is None else predict
        self.graph = Replay(run, workspace.memory, launches)

    def __call__(self, state: CausalState) -> CausalState:
        copy_all(list(self._inputs.values()), list(_fields(state).values()))
        self.graph.replay()
        after = {name: torch.empty_like(x) for name, x in self.graph.result.items()}
        copy_all(list(after.values()), list(self.graph.result.values()))
        return replace(state, **after)


def _fields(state: CausalState) -> dict[str, Tensor]:
    return {field.name: getattr(state, field.name) for field in fields(CausalState)}
