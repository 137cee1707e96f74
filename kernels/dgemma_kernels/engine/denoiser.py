"""The fused denoiser: the interface of `dgemma.DiffusionGemma` over Triton kernels and CUDA graphs, for inference.

`step` is a whole denoising step (embedding, self-conditioning, layers, head, vocabulary pass, sampler, stop test) in
two graphs without host synchronisation. The first ends with the stop test. The second computes the soft embedding for
the next step; while it runs, the host prepares that step. Everything that varies is on the device. A graph
is captured for one set of frozen values: sampler, noise, temperature schedule, stop rule and shapes.
"""

import copy
import weakref
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState, watch
from dgemma.model.config import Conventions, GenerationDefaults, ModelConfig
from dgemma.model.diffusion import DiffusionGemma
from dgemma.run.knobs import Knobs
from dgemma.run.records import StepRecord
from dgemma.run.step import Denoiser
from dgemma.tasks.autoregressive import CausalRule, CausalState
from dgemma.train.lora import is_adapted
from dgemma_kernels.engine.cache import BufferPool, CacheBuffers, FusedCache
from dgemma_kernels.engine.captured import (
    CapturedCausalStep,
    CapturedDenoise,
    CapturedRead,
    CapturedStep,
    carried,
    list_shapes,
)
from dgemma_kernels.engine.forward import Forward
from dgemma_kernels.engine.graphs import GraphMemory, Turn, compile_together, in_turn, remembered, use_here
from dgemma_kernels.engine.prediction import FusedPrediction, Logits, SoftEmbedding
from dgemma_kernels.engine.weights import FLOAT8_PARTS, ModelWeights, stored_format, take_weights
from dgemma_kernels.engine.workspace import Workspace
from dgemma_kernels.formats import ENCODERS, FourBit, Quantized
from dgemma_kernels.ops.attention import KernelName
from dgemma_kernels.ops.draws import kernel as draws

# Limits on the tokens of a prompt, over all rows: for one forward; for one that is captured when its size comes a
# second time; and for one that is captured when its size comes _IN_A_ROW times in a row. Capture takes tens of
# milliseconds, and large forwards gain less from it. Activations and the tail of sliding layers take 330 kB per token
# of the published model. So weights of four bits, which are chosen for their size, have lower limits.
_READ, _FOUR_BIT_READ = (8192, 2048, 8192), (1024, 256, 256)
_IN_A_ROW = 3
_MOST_REHEARSED = 4  # rows; for more, the kernels of a step are not compiled together with those of a prompt


def accelerate(
    model: DiffusionGemma,
    weights: str | None = None,
    *,
    float8: Collection[str] = (),
    release: bool = False,
    attention: KernelName = "auto",
    batch_invariant: bool = False,
) -> "FusedDenoiser":
    """Return the same denoiser with fused kernels, for `dgemma.generate` to use in place of the model.

    The model's tensors are shared, not copied; its q, k and v projections, and its gate and up projections, become
    views of fused tensors. Do not move, train or cast the model while the accelerated one is in use. `weights` is the
    format of the experts, which are 42 of the 47 GiB of the published model. By default it is the format that the model
    has.

    - `weights="bf16"` uses the weights unchanged.
    - `weights="packed"` stores them in 12 bits per weight without loss: 32 GiB of experts. It is faster because a step
      mostly reads weights.
    - `weights="fp8"` rounds them to float8 (e4m3) with a scale per output, and their inputs with one per row: 21 GiB of
      experts. It needs a GPU with fp8 tensor cores: Ada, Hopper or later.
    - `weights="int4"` rounds them to integers of 4 bits with a scale per 64 columns, and `weights="nvfp4"` to floats of
      4 bits with a scale per 16 columns: 11 and 12 GiB of experts. Inputs keep their dtype.

    A model with quantised experts keeps its own format; its codes are reordered and never decoded. `float8` names other
    products to compute in float8: "attention" (q, k, v and o), "dense" (the dense MLP), "head" and "soft_embedding".
    The last one stores the embedding a second time, in 8 bits. For int4 on Hopper, "experts" rounds the experts' input
    to float8 in forwards of 65 to 1,152 tokens, such as one canvas.

    Converted weights are new tensors; the model's own are freed with the model. `release` removes them from the model
    as soon as they are converted, so that at most one layer exists twice. `attention` names the attention kernel:
    "triton", "hopper" or "auto" (the choice of `dgemma_kernels.ops.attention.choose_kernel`). "hopper" raises where it
    cannot run.

    With `batch_invariant`, a row's logits have the same bits in any batch, at any place in it, and however its prompt
    is divided into calls. For a given seed, its tokens are the same too. It costs some speed for large batches and
    single tokens.

    Example: `fast = accelerate(DiffusionGemma.from_pretrained(path, dtype=torch.bfloat16, device="cuda"))`.
    """
    if not isinstance(model, DiffusionGemma):
        raise TypeError(
            f"accelerate model must be a DiffusionGemma, got {type(model).__name__}. Pass the original model."
        )
    if weights is None:
        weights = stored_format(model)
    if weights not in ENCODERS:
        raise ValueError(f"accelerate weights must be one of {', '.join(ENCODERS)}, got {weights!r}.")
    if unknown := set(float8) - set(FLOAT8_PARTS):
        raise ValueError(f"accelerate float8 must name {', '.join(FLOAT8_PARTS)}, got {sorted(unknown)}.")
    if weights == "bf16" and (release or float8):
        what = "release must be False" if release else "float8 must be empty"
        raise ValueError(f'accelerate {what} for weights="bf16", which are the model\'s own.')
    if "experts" in float8 and batch_invariant:
        raise ValueError(
            'accelerate batch_invariant must be False for float8 "experts", which depends on the batch size.'
        )
    _require_gpu(model, float8=weights == "fp8" or bool(float8))
    config = model.config
    for name in ("head_dim", "global_head_dim"):
        size = getattr(config, name)
        if size < 16 or size & (size - 1):
            raise ValueError(f"ModelConfig.{name} must be a power of two >= 16 for the kernels, got {size}.")
    if config.num_experts > 256:
        raise ValueError(f"ModelConfig.num_experts must be at most 256 for the kernels, got {config.num_experts}.")
    if config.noise_conditioning:
        raise ValueError(
            "ModelConfig.noise_conditioning must be False for the kernels, got True. Use the model itself."
        )
    if is_adapted(model):
        raise ValueError("accelerate model must have its adapters merged. Call dgemma.train.merge_lora(model) first.")
    return FusedDenoiser(
        model, weights, float8=float8, release=release, attention=attention, batch_invariant=batch_invariant
    )


def _require_gpu(model: DiffusionGemma, *, float8: bool) -> None:
    if model.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(
            f"accelerate needs the model on a CUDA GPU, got {model.device}. Move it there, or use the model itself, "
            "which runs anywhere."
        )
    if float8 and model.device.type == "cuda":
        capability = torch.cuda.get_device_capability(model.device)
        if capability < (8, 9):
            raise ValueError(
                "accelerate float8 products need a GPU of compute capability 8.9 or higher, got "
                f'{capability[0]}.{capability[1]}. Use weights="bf16".'
            )


def _without_layers(model: DiffusionGemma) -> DiffusionGemma:
    """Return the model without its layers, for its defaults and checks. Later casts of the model do not change it."""
    rest = copy.copy(model)
    rest._modules = {"embed_tokens": nn.Embedding.from_pretrained(model.embed_tokens.weight.detach())}
    return rest


def _without_embedding(weights: ModelWeights) -> ModelWeights:
    head: Any = weights.head if isinstance(weights.head, Quantized) else None
    return replace(weights, embedding=weights.embedding.new_empty(0), head=head)


class _LastStep:
    """The last step. The state after it is already loaded, so the next step from there copies nothing."""

    def __init__(self, state: DenoiseState, knobs: Knobs, buffers: CacheBuffers, captured: CapturedStep) -> None:
        self._state, self._knobs, self._buffers, self.captured = weakref.ref(state), knobs, buffers, captured
        leaves = tree_leaves(carried(state))
        self._written = watch(*(x for x in leaves if isinstance(x, Tensor)))

    def led_to(self, state: DenoiseState, knobs: Knobs, buffers: CacheBuffers) -> bool:
        """Return True if `state` is the unmodified result of this step, and the knobs and buffers are the same."""
        same = self._state() is state and self._knobs is knobs and self._buffers is buffers
        return same and self.captured.keeps_form and not self._written()


class FusedDenoiser(Denoiser[FusedCache]):
    """The result of `accelerate`, for batches of any size. Predictions of `step` are readable until the next step.

    Several threads may use one denoiser. Each call holds the lock `turn`, and steps of different runs may alternate in
    any order. A thread's last prediction stays readable until that thread takes its next step.
    """

    config: ModelConfig
    generation: GenerationDefaults  # the model's at first; later changes of either do not affect the other
    has_causal_mode = True

    @torch.no_grad()
    def __init__(
        self,
        model: DiffusionGemma,
        weights: str = "bf16",
        *,
        float8: Collection[str] = (),
        release: bool = False,
        attention: KernelName = "auto",
        batch_invariant: bool = False,
    ) -> None:
        taken = take_weights(model, weights, float8=float8, release=release)
        used = model if weights == "bf16" else _without_layers(model)
        self._start(used, taken, model.generation, attention, batch_invariant)

    def _start(
        self,
        model: DiffusionGemma,
        weights: ModelWeights,
        generation: GenerationDefaults,
        attention: KernelName,
        batch_invariant: bool,
    ) -> None:
        self._model, self.config, self.generation = model, model.config, generation
        self.source = model.source
        self.turn = Turn(model.device)
        small = isinstance(weights.layers[0].expert_gate_up, FourBit)
        most_read, self._most_captured_soon, self._most_captured = _FOUR_BIT_READ if small else _READ
        forward = Forward(model.config, weights, attention, batch_invariant=batch_invariant)
        graph_memory = GraphMemory(model.device, forward.sides) if model.device.type == "cuda" else None
        self._workspace = Workspace(
            config=model.config,
            conventions=model.conventions,
            device=model.device,
            dtype=model.dtype,
            forward=forward,
            turn=self.turn,
            graph_memory=graph_memory,
        )
        self._pool = BufferPool(
            model.config,
            model.conventions,
            model.device,
            model.dtype,
            self.turn,
            most_read,
            graph_memory,
            self._workspace.logits_bytes,
        )
        self._shapes_read: set[Any] = set()  # of chunks of a prompt
        self._last: _LastStep | None = None
        # The last step's prediction, while it is referenced, and the step that can compute its soft embedding.
        self._unsoftened: tuple[Any, CapturedStep | None] = (lambda: None, None)

    @property
    def _forward(self) -> Forward:
        return self._workspace.forward

    def __getstate__(self) -> dict[str, Any]:
        """Return the content of a copy or a pickle: weights. A copy makes new graphs and buffers."""
        weights = None  # None: the weights are the model's own
        if "layers" not in self._model._modules:
            own_weights = self._forward.weights
            weights = _without_embedding(own_weights)  # stored with the model
        return {
            "model": self._model,
            "weights": weights,
            "generation": self.generation,
            "attention": self._forward.attention_kernel,
            "batch_invariant": self._forward.batch_invariant,
        }

    @torch.no_grad()
    def __setstate__(self, state: dict[str, Any]) -> None:
        model, weights = state["model"], state["weights"]
        first = None if weights is None else weights.layers[0]
        products = () if first is None else (first.expert_gate_up, first.qkv, first.down, weights.head)
        float8 = any(isinstance(weight, Quantized) for weight in products)
        _require_gpu(model, float8=float8)  # a pickle may be loaded on another machine
        if weights is None:
            weights = take_weights(model)
        else:
            embedding = model.embed_tokens.weight.detach()
            weights = replace(
                weights, embedding=embedding, head=weights.head if weights.head is not None else embedding
            )
        self._start(model, weights, state["generation"], state["attention"], state["batch_invariant"])

    @property
    def conventions(self) -> Conventions:
        return self._model.conventions

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @in_turn
    def uniform(self, seeds: Tensor, block: Tensor, step: Tensor, num_positions: int, purpose: str) -> Tensor:
        """Draw the uniforms of `dgemma.diffusion.draws.uniform`, bit for bit, in one launch."""
        seeds, block, step = (x.long().contiguous() for x in (seeds, block, step))
        return draws.uniform(seeds, block, step, num_positions, purpose)

    def new_cache(self, batch_size: int) -> FusedCache:
        """Return an empty prefix for `batch_size` rows."""
        return FusedCache(self._pool, batch_size)

    @torch.no_grad()
    @in_turn
    def encode(
        self, tokens: Tensor, cache: FusedCache | None = None, attention_mask: Tensor | None = None
    ) -> FusedCache:
        """Read tokens (B, P) causally into a prefix cache; see `DiffusionGemma.encode`."""
        fused, real = self._check_prefix(tokens, cache, attention_mask)
        if real is None and fused.num_slots > 0 and tokens.shape[1] == self.config.canvas_length:
            fused.postpone(tokens, self._read_block)  # a finished canvas: the first step of the next one reads it
            return fused
        fused.catch_up()
        self._read(tokens, fused, real, last=False)
        fused.settle()  # now, while the device is busy, and not before the next canvas
        return fused

    @torch.no_grad()
    @in_turn
    def causal_logits(
        self, tokens: Tensor, cache: FusedCache | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Return next-token logits of tokens (B, T): (B, T, V) float32; see `DiffusionGemma.causal_logits`."""
        fused, real = self._check_prefix(tokens, cache, attention_mask)
        fused.catch_up()
        if tokens.shape[1] == 1 and real is None:
            return self._read_token(tokens, fused)
        hidden = self._read(tokens, fused, real, last=True)
        assert hidden is not None
        return self._workspace.causal_logits(hidden.flatten(0, 1)).view(*tokens.shape, -1)

    @torch.no_grad()
    @in_turn
    def causal_step(self, state: CausalState, *, cache: FusedCache, rule: CausalRule) -> CausalState:
        """Read the last token and draw the next one in one graph; see `Denoiser.causal_step`."""
        fused, _ = self._check_prefix(state.token, cache, None)
        fused.catch_up()
        buffers = fused.make_room(1, self.config.canvas_length)
        self._soften()
        make = lambda: CapturedCausalStep(self._workspace, state, rule, buffers)  # noqa: E731
        after = remembered(buffers.graphs, ("causal", rule, state.token.shape), make)(state)
        fused.extend(1, None)
        return after

    @torch.no_grad()
    @in_turn
    def denoise(
        self,
        canvas: Tensor,
        cache: FusedCache,
        self_cond: Prediction | Tensor | None = None,
        self_cond_mask: Tensor | None = None,
    ) -> FusedPrediction:
        """Predict every position of canvas (B, C) at once; see `DiffusionGemma.denoise`. Its logits are a copy."""
        fused = self._check_canvas(canvas, cache)
        fused.catch_up()
        buffers = fused.make_room(canvas.shape[1])
        fused.settle()
        self._soften()
        signal = self._signal(self_cond)
        if signal is not None and self_cond_mask is not None:
            signal = signal * self_cond_mask.to(signal.dtype)[:, None, None]
        captured = remembered(
            buffers.graphs, ("denoise", canvas.shape), lambda: CapturedDenoise(self._workspace, canvas, signal, buffers)
        )
        return FusedPrediction(Logits(captured(canvas, signal)), (self._workspace.softcap,))

    @torch.no_grad()
    @in_turn
    def step(self, state: DenoiseState, *, cache: FusedCache, knobs: Knobs) -> tuple[DenoiseState, StepRecord]:
        """Take one denoising step by replaying graphs. Like `dgemma.step` it is pure, but logits are overwritten later.

        Example: `state, record = fast.step(state, cache=cache, knobs=knobs)`.
        """
        self._soften()  # first, because the device is idle until then
        fused = self._check_canvas(state.canvas, cache)
        postponed = fused.postponed
        num_postponed = 0 if postponed is None else postponed.shape[1]
        buffers = fused.make_room(num_postponed + state.canvas_len)
        fused.settle()
        last, self._last = self._last, None  # set again at the end: after an error, other inputs may be loaded
        as_last = postponed is None and last is not None and last.led_to(state, knobs, buffers)
        if last is not None and as_last:
            captured = last.captured
            logits = captured.replay()
        leaves, form = tree_flatten(carried(state))
        if not as_last:
            signal = self._signal(state.self_cond)
            shapes = list_shapes(leaves)
            captured = remembered(
                buffers.graphs,
                ("step", knobs, type(state), str(form), shapes, num_postponed),
                lambda: CapturedStep(self._workspace, state, knobs, postponed, signal, buffers),
            )
            captured.load(leaves, postponed, signal)
            logits = captured.replay()
        after, record, prediction = captured.results(state, leaves, logits)
        self._unsoftened = weakref.ref(prediction), captured
        prediction.soften = self._soften
        if num_postponed:
            fused.take_postponed()
            fused.extend(num_postponed, None)
        after_state = replace(state, **after, self_cond=prediction)
        self._last = None if num_postponed else _LastStep(after_state, knobs, buffers, captured)
        return after_state, StepRecord(**record, prediction=prediction, state=after_state, cache=fused, knobs=knobs)

    @torch.no_grad()
    def read_ahead(self, values: Tensor) -> list[Any]:
        """Return `values.tolist()` while the device computes the soft embedding for the next step.

        Example: `left, broken, stray = fast.read_ahead(record.verdict)`.
        """
        with self.turn:
            on_host = values.to("cpu", non_blocking=True)
            arrived = torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None
            self._soften()
        if arrived is not None:
            arrived.synchronize()
        return on_host.tolist()

    def _signal(self, self_cond: Prediction | SoftEmbedding | Tensor | None) -> Tensor | None:
        """Return the soft embedding (B, C, D) for self-conditioning."""
        if self_cond is None:
            return None
        if isinstance(self_cond, SoftEmbedding):
            use_here(self_cond.signal)
            return self_cond.signal
        if isinstance(self_cond, FusedPrediction):
            if self_cond.signal is not None:
                use_here(self_cond.signal)
                return self_cond.signal
            return self._workspace.soft_embedding(self_cond)
        logits = self_cond.logits if isinstance(self_cond, Prediction) else self_cond
        return self._workspace.soft_embedding_of(logits)

    def _soften(self) -> None:
        """Compute the soft embedding of the last step before another graph overwrites its logits."""
        prediction, captured = self._unsoftened[0](), self._unsoftened[1]
        self._unsoftened = (lambda: None, None)
        if prediction is not None and captured is not None:
            last, self._last = self._last, None  # after an error, its state is not loaded
            prediction.signal = captured.soften()
            self._last = last

    @torch.no_grad()
    @in_turn
    def _read_block(self, tokens: Tensor, cache: FusedCache) -> None:
        self._read(tokens, cache, None, last=False)
        cache.settle()

    def _read(self, tokens: Tensor, cache: FusedCache, real: Tensor | None, *, last: bool) -> Tensor | None:
        """Run tokens (B, T) causally, chunk by chunk, and commit them → the last hidden state (B, T, D) if `last`."""
        num_new, counts, order = tokens.shape[1], None, None
        if real is not None:
            # A row's real tokens come first. Padding is written after its prefix and never counted.
            order = (~real).to(torch.uint8).sort(dim=1, stable=True).indices
            tokens, counts = tokens.gather(1, order), real.sum(1)
        chunk_len = self._pool.prefill_len(tokens.shape[0])
        hidden = []
        for start in range(0, num_new, chunk_len):
            chunk = tokens[:, start : start + chunk_len]
            size = chunk.shape[1]
            hidden.append(self._read_chunk(chunk, cache, num_new - start + self.config.canvas_length, last))
            cache.extend(size, None if counts is None else (counts - start).clamp(0, size))
        if not last:
            return None
        no_tokens = torch.empty(tokens.shape[0], 0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        joined = torch.cat([no_tokens, *hidden], dim=1)
        if order is None:
            return joined
        back = torch.empty_like(order).scatter(1, order, torch.arange(num_new, device=order.device).expand_as(order))
        return joined.gather(1, back[..., None].expand_as(joined))

    def _read_token(self, tokens: Tensor, cache: FusedCache) -> Tensor:
        """Take one autoregressive step, with the head in the same graph: (B, 1) → (B, 1, V) float32."""
        buffers = cache.make_room(1, self.config.canvas_length)
        self._soften()
        make = lambda: CapturedRead(self._workspace, tokens, buffers, last=True, head=True)  # noqa: E731
        logits = remembered(buffers.graphs, ("token", tokens.shape), make)(tokens)
        cache.extend(1, None)
        return logits[:, None]

    def _read_chunk(self, tokens: Tensor, cache: FusedCache, num_slots: int, last: bool) -> Tensor:
        """Run one chunk (B, T) into the tail of the cache, which gets `num_slots` in all → (B, T, D) if `last`.

        A captured chunk is padded to one of a few sizes. Padding is after the chunk in a causal forward, so it changes
        no other token.
        """
        batch, size = tokens.shape
        padded = min(_round_up(size), self._pool.prefill_len(batch))
        buffers = cache.make_room(padded, max(0, num_slots - padded))
        key = ("read", (batch, padded), last)
        times = buffers.count_read(key)
        is_small = batch * padded <= self._most_captured_soon
        is_captured = key in buffers.graphs or (times >= _IN_A_ROW and batch * padded <= self._most_captured)
        if is_small or is_captured:
            tokens = nn.functional.pad(tokens, (0, padded - size))
        num_new = tokens.shape[1]
        shape = (batch, num_new) if is_small else tokens.numel().bit_length()  # another size may need other kernels
        if is_captured or (is_small and shape in self._shapes_read):
            self._soften()
            make = lambda: CapturedRead(self._workspace, tokens, buffers, last)  # noqa: E731
            hidden = remembered(buffers.graphs, key, make)(tokens)
        else:
            read = partial(self._forward.read, tokens.long(), buffers, last=last)
            if shape not in self._shapes_read and self.device.type == "cuda":
                # After the first prompt comes a canvas, whose kernels are compiled at the same time. Its logits take
                # 134 MB per row of the published model, so large batches compile theirs later.
                later = bool(self._shapes_read) or batch > _MOST_REHEARSED
                compile_together(read if later else lambda: (read(), *self._rehearse(buffers)))
            self._shapes_read.add(shape)
            hidden = read()
        return hidden.view(batch, num_new, -1)[:, :size]

    def _rehearse(self, buffers: CacheBuffers) -> tuple[Tensor, Tensor]:
        """Launch the kernels of a denoising step on empty tensors, for `compile_together`."""
        shape = (buffers.lengths.shape[0], self.config.canvas_length)
        canvas = torch.zeros(shape, dtype=torch.int64, device=self.device)
        hidden = self._forward.canvas(canvas, self._workspace.static_signal(canvas.numel(), None), buffers)
        prediction = FusedPrediction(Logits(self._forward.head(hidden).unflatten(0, shape)), (self._workspace.softcap,))
        prediction = prediction.shaped(temperature=torch.ones(shape[0], device=self.device))
        uniform = torch.zeros(shape, dtype=torch.float64, device=self.device)
        return prediction.sample(uniform), self._workspace.soft_embedding(prediction)

    def _check_canvas(self, canvas: Tensor, cache: FusedCache) -> FusedCache:
        self._model.check_tokens(canvas, cache, "canvas")
        return self._own(cache)

    def _check_prefix(
        self, tokens: Tensor, cache: FusedCache | None, attention_mask: Tensor | None
    ) -> tuple[FusedCache, Tensor | None]:
        fused = self.new_cache(tokens.shape[0]) if cache is None else self._own(cache)
        return fused, self._model.check_prefix(tokens, fused, attention_mask)

    def _own(self, cache: FusedCache) -> FusedCache:
        if not isinstance(cache, FusedCache) or cache.pool is not self._pool:
            raise ValueError(
                f"FusedDenoiser cache must come from this model, got a {type(cache).__name__} of another model. "
                "Encode the prefix with the accelerated model."
            )
        return cache


def _round_up(num_tokens: int) -> int:
    """Return the size to which a chunk is padded: a power of two up to 512, then a multiple of 256."""
    return 1 << (num_tokens - 1).bit_length() if num_tokens <= 512 else -(-num_tokens // 256) * 256
