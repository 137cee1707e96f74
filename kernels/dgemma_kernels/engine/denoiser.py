"""The fused denoiser: the interface of `dgemma.DiffusionGemma` over Triton kernels and CUDA graphs, for inference.

`step` is a whole denoising step in three graphs without host synchronisation: the forward, then sampler and stop test,
then the soft embedding for the next step (`step.py`). While the third runs, the host prepares that step. Everything
that varies is on the device. The last two are captured for one set of frozen values: sampler, noise, temperature
schedule, stop rule and shapes.
"""

import copy
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NoReturn

import torch
import triton
from torch import Tensor, nn

from dgemma.constraints.automaton import Automaton
from dgemma.constraints.canvas_language import Language
from dgemma.diffusion.prediction import Prediction
from dgemma.diffusion.state import DenoiseState
from dgemma.model.causal import CausalRule, CausalState
from dgemma.model.config import Conventions, GenerationDefaults, ModelConfig
from dgemma.model.denoiser import Denoiser, require_vision
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.inputs import check_prefix, check_tokens
from dgemma.model.vision.images import Images
from dgemma.printing import progress_bar
from dgemma.run.generate import generate
from dgemma.run.knobs import Knobs
from dgemma.run.plan import read_plan
from dgemma.run.records import StepRecord
from dgemma.run.step import start_state
from dgemma.tasks.autoregressive import generate_causal
from dgemma_kernels.engine.cache import Arena, CacheBuffers, FusedCache
from dgemma_kernels.engine.checks import check_model, check_weights, require_gpu
from dgemma_kernels.engine.forward import Forward, choose_kernels
from dgemma_kernels.engine.graphs import Graphs, compile_together, in_turn
from dgemma_kernels.engine.precision import choose_parts
from dgemma_kernels.engine.prediction import FusedPrediction, Logits
from dgemma_kernels.engine.reading import MOST_READ, MOST_READ_FOUR_BIT, CausalReader, read_sizes
from dgemma_kernels.engine.step import Stepper
from dgemma_kernels.engine.weights import stored_format, take_weights
from dgemma_kernels.engine.workspace import Workspace
from dgemma_kernels.formats import FourBit
from dgemma_kernels.ops.attention.kernel import KernelName
from dgemma_kernels.ops.automaton.kernel import launch_passes
from dgemma_kernels.ops.draws import kernel as draws

_ANSWER = 8  # canvases after a prompt, for which a warmed-up engine has room


def accelerate(
    model: DiffusionGemma,
    weights: str | None = None,
    *,
    precision: str | Collection[str] = "exact",
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
    - `weights="fp8"` rounds them to float8 (e4m3) with a scale per output, and the experts' inputs with a scale per
      token: 21 GiB of experts. It needs a GPU with fp8 tensor cores: Ada, Hopper or later.
    - `weights="int4"` rounds them to integers of 4 bits with a scale per 64 columns, and `weights="nvfp4"` to floats of
      4 bits with a scale per 16 columns: 11 and 12 GiB of experts. Inputs keep their dtype.

    A model with quantised experts keeps its own format; its codes are reordered and never decoded.

    `precision` says what is rounded besides the experts. "exact" rounds nothing else. "fast" computes more in float8:

    | weights | "fast" computes in float8 |
    |---|---|
    | "bf16" | "prompt_attention" |
    | "packed", "fp8" | "attention", "dense", "head", "soft_embedding", "prompt_attention" |
    | "int4" | "attention", "dense", "head", "soft_embedding", "experts" |
    | "nvfp4" | "attention", "dense", "head", "soft_embedding" |

    For experiments, pass the names of parts, such as `precision=("attention", "dense")`. A part that cannot run raises.

    - "attention" (q, k, v and o), "dense" (the dense MLP), "head" and "soft_embedding" are products of weights, and
      need fp8 tensor cores. The last one stores the embedding a second time, in 8 bits.
    - "experts" rounds the input of int4 experts, in forwards of 65 to 1,152 tokens, such as one canvas. It needs
      Hopper and Triton 3.6.
    - "prompt_attention" computes both products of attention in layers with full attention, in forwards over at least
      1,024 prompt tokens. It needs Hopper and Triton 3.6, and 2 KiB per token of the prompt while it runs.

    With `batch_invariant`, "fast" leaves out "experts" and "prompt_attention".

    Converted weights are new tensors, and the model keeps its own. With `release`, the model drops a layer's weights
    once they are converted, so that at most one layer exists twice. `attention` names the attention kernel: "triton",
    "hopper" or "auto" (the choice of `dgemma_kernels.ops.attention.choose_kernel`). "hopper" raises where it cannot
    run.

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
    check_weights(weights, release=release)
    float8 = choose_parts(precision, weights, batch_invariant=batch_invariant)
    require_gpu(model, float8=weights == "fp8" or bool(set(float8) - {"prompt_attention"}))
    check_model(model)
    return FusedDenoiser(
        model, weights, float8=float8, release=release, attention=attention, batch_invariant=batch_invariant
    )


def _without_layers(model: DiffusionGemma) -> DiffusionGemma:
    """Return the model without its layers, for its defaults and checks. Later casts of the model do not change it."""
    rest = copy.copy(model)
    # `delattr` would remove the layers of the original too, because a shallow copy shares this dictionary.
    rest._modules = {"embed_tokens": nn.Embedding.from_pretrained(model.embed_tokens.weight.detach())}
    if model.vision is not None:
        rest._modules["vision"] = model.vision
    return rest


class FusedDenoiser(Denoiser[FusedCache]):
    """The result of `accelerate`, for batches of any size.

    Several threads may use one denoiser. Each call holds the lock `turn`, and steps of different runs may alternate in
    any order. A prediction of `step` is readable until the same thread takes its next step.
    """

    config: ModelConfig
    conventions: Conventions
    device: torch.device
    dtype: torch.dtype
    generation: GenerationDefaults  # the model's at first; later changes of either do not affect the other
    has_causal_mode = shares_prefixes = True

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
        # Raises before `release` takes weights out of the model.
        prompt_attention = "prompt_attention" in float8
        choose_kernels(model.config, model.embed_tokens.weight, attention, prompt_attention=prompt_attention)
        taken = take_weights(model, weights, float8=float8, release=release)
        self._model = model if weights == "bf16" else _without_layers(model)
        self.config, self.conventions, self.generation = model.config, model.conventions, model.generation
        self.device, self.dtype = model.device, model.dtype
        self.source, self.takes_images, self.image_tokens = model.source, model.takes_images, model.image_tokens
        most_read = MOST_READ_FOUR_BIT if isinstance(taken.layers[0].expert_gate_up, FourBit) else MOST_READ
        self._forward = Forward(
            model.config, taken, attention, batch_invariant=batch_invariant, prompt_attention=prompt_attention
        )
        self._workspace = Workspace(self._model, self._forward)
        self.turn = self._workspace.turn
        self._arena = Arena(model, most_read, self._workspace.memory, self._workspace.graphs)
        self._stepper = Stepper(self._workspace)
        self._reader = CausalReader(self._workspace, self._arena, before_graph=self._stepper.finish)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "FusedDenoiser must not be pickled or copied, because its graphs hold addresses. Accelerate a copy of the "
            "model."
        )

    def weight_tensors(self) -> list[Tensor]:
        """Return the tensors of the model, which the weights in bf16 share."""
        return self._model.weight_tensors()

    @in_turn
    def uniform(self, seeds: Tensor, block: Tensor, step: Tensor, num_positions: int, purpose: str) -> Tensor:
        """Draw the uniforms of `dgemma.diffusion.draws.uniform`, bit for bit, in one launch."""
        seeds, block, step = (x.long().contiguous() for x in (seeds, block, step))
        return draws.uniform(seeds, block, step, num_positions, purpose)

    @torch.no_grad()
    @in_turn
    def warm_up(self, batch_size: int = 16, num_tokens: int = 16_384, *, progress: bool = True) -> None:
        """Compile and capture all forwards of up to `batch_size` rows, each with up to `num_tokens` tokens.

        Afterwards no call of `encode`, `denoise`, `step` or `generate` compiles or captures a forward, except for a
        batch of prompts with images. The first step with a new sampler or setting runs what follows the forward once
        more, to capture it, and compiles a kernel for a constraint with many branches. `generate_causal` compiles
        nothing, but captures its forward for every setting and number of rows. `causal_logits` of several tokens is
        left out. Memory for such calls is allocated now: 0.85 GB per row for the published model.

        Example: `fast = accelerate(model); fast.warm_up()`.
        """
        canvas_len, most_rows, workspace = self.config.canvas_length, range(1, batch_size + 1), self._workspace
        self._stepper.finish()
        self._stepper.place(torch.Size((batch_size, canvas_len)))
        self._arena.make_room(batch_size, num_tokens + _ANSWER * canvas_len, canvas_len)
        if (seated := self._arena.seated()) is not None:
            seated.leave()
        sizes = {rows: read_sizes(self._arena.prefill_len(rows)) for rows in most_rows}
        inputs = [[self._zeros(rows, size)] for rows in most_rows for size in sizes[rows]]
        if workspace.vision is not None and not self._forward.batch_invariant:
            workspace.vision.warm_up()
            alone = [self._zeros(1, size) for size in sizes[1]]
            inputs += [[tokens, self._forward.embed_prompt(tokens)] for tokens in alone]
        if not triton.knobs.runtime.interpret:
            compile_together(self._forward.rehearsal(lambda: self._launch_all(inputs, most_rows)))
        workspace.memory.is_warm = True
        num_graphs = len(inputs) + 4 * batch_size
        # Later calls have as much room as without a warm-up.
        workspace.graphs.most = max(workspace.graphs.most, Graphs.most + num_graphs)
        with progress_bar(desc="warming up", unit="graph", show=progress, total=num_graphs) as bar:
            # Largest first, so that the smaller ones find memory in the graphs' pool.
            for read in sorted(inputs, key=lambda read: read[0].numel(), reverse=True):
                self._reader.capture(read, self._empty_buffers(len(read[0]))).graph.mark_stale()
                bar.update()
            for rows in most_rows:
                canvas, buffers = self._zeros(rows, canvas_len), self._empty_buffers(rows)
                place = self._stepper.place(canvas.shape)
                for postponed in ([], [canvas]):
                    self._stepper.capture(place, buffers, postponed).graph.mark_stale()
                self._arena.capture_trim(rows).mark_stale()
                generate(self, canvas[:, :1], max_new_tokens=canvas_len, steps=1, progress=False)
                bar.update(4)
        generate_causal(self, self._zeros(1, 1), max_new_tokens=1)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of the runs before each capture

    def _launch_all(self, reads: list[list[Tensor]], most_rows: range) -> None:
        """Launch the kernels of all forwards and of a step's other graphs."""
        for tokens, *embedded in reads:
            buffers = self._empty_buffers(len(tokens))
            self._forward.read(tokens, buffers, last=False, embedded=embedded[0] if embedded else None)
        size = self.config.canvas_length
        for rows in most_rows:
            canvas, buffers = self._zeros(rows, size), self._empty_buffers(rows)
            signal = self._workspace.soft_embedding(None, canvas.shape)
            self._forward.read_and_canvas(canvas, canvas, signal, buffers)
            hidden = self._forward.canvas(canvas, signal, buffers)
            self._forward.head(hidden, out=self._stepper.place(canvas.shape).logits.flatten(0, 1))
            token, number = self._zeros(rows, 1), self._zeros(rows)
            self._workspace.causal_logits(self._forward.read(token, buffers, last=True))
            self.uniform(number, number, number, 1, "token")
            for top_k in (None, 2):
                self._use_prediction(canvas, top_k=top_k)
                self._use_prediction(token, temperature=1.0, top_k=top_k)
        self._use_prediction(canvas[:1], top_k=2, top_p=0.5)
        self._launch_constraints()

    def _launch_constraints(self) -> None:
        """Launch the kernels of steps with and without constraints, masks and stop rules."""
        size, vocab_size = self.config.canvas_length, self.config.vocab_size
        plan = read_plan(self, self._zeros(1, 1))
        token_class = torch.arange(vocab_size, dtype=torch.int32).clamp(max=1)
        automaton = Automaton.build(token_class, torch.tensor([[1, 0], [1, 1]]), torch.tensor([False, True]))
        mask = torch.ones(1, min(size, 16), vocab_size, dtype=torch.bool, device=self.device)  # more would be large
        for length, masks in ((size, (None, mask[:, :1])), (mask.shape[1], (mask,))):
            may_end = mask.new_ones(1, length)
            language = Language(automaton.to(self.device), self._zeros(1), mask.new_ones(1, 2), may_end)
            languages = (None, language, language._replace(may_end=None))
            for of_text, allowed, stop in product(languages, masks, (plan.knobs.stop, None)):
                knobs = replace(plan.knobs, stop=stop)
                options: Any = {"seeds": self._zeros(1), "canvas_len": length}
                options |= {"num_steps": 1, "canvas": self._zeros(1, length), "language": of_text, "allowed": allowed}
                self._stepper.launch(start_state(knobs, plan.noise, **options), knobs)
        launch_passes(language, size)

    def _use_prediction(self, canvas: Tensor, **shaping: Any) -> None:
        """Sample a canvas (B, C) from the last logits, and compute their soft embedding."""
        logits = Logits(self._stepper.place(canvas.shape).logits, self.turn)
        raw = FusedPrediction(logits, (self._workspace.softcap,))
        prediction = raw.shaped(**{"temperature": torch.ones(len(canvas), device=self.device)} | shaping)
        prediction.sample(torch.zeros(canvas.shape, dtype=torch.float64, device=self.device))
        if canvas.shape[1] > 1:  # not of a single token
            self._workspace.soft_embedding(prediction, canvas.shape)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def _empty_buffers(self, batch_size: int) -> CacheBuffers:
        buffers = self._arena.buffers(batch_size)
        buffers.counters.zero_()
        return buffers

    def new_cache(self, batch_size: int) -> FusedCache:
        """Return an empty prefix for `batch_size` rows."""
        return FusedCache(self._arena, batch_size)

    @torch.no_grad()
    @in_turn
    def encode(
        self,
        tokens: Tensor,
        cache: FusedCache | None = None,
        attention_mask: Tensor | None = None,
        images: Images | None = None,
    ) -> FusedCache:
        """Read tokens (B, P) causally into a prefix cache; see `DiffusionGemma.encode`."""
        fused, real = self._check_prefix(tokens, cache, attention_mask, images)
        if images is None and real is None and fused.num_slots > 0 and tokens.shape[1] == self.config.canvas_length:
            fused.postpone(tokens, self._read_block)  # a finished canvas: the first step of the next one reads it
            return fused
        fused.catch_up()
        self._reader.read(tokens, fused, real, last=False, images=images)
        fused.trim()  # now, while the device is busy, so that the next canvas does not wait for it
        return fused

    @torch.no_grad()
    @in_turn
    def causal_logits(
        self,
        tokens: Tensor,
        cache: FusedCache | None = None,
        attention_mask: Tensor | None = None,
        images: Images | None = None,
    ) -> Tensor:
        """Return next-token logits of tokens (B, T): (B, T, V) float32; see `DiffusionGemma.causal_logits`."""
        fused, real = self._check_prefix(tokens, cache, attention_mask, images)
        fused.catch_up()
        if tokens.shape[1] == 1 and real is None and images is None:
            return self._reader.read_token(tokens, fused)
        hidden = self._reader.read(tokens, fused, real, last=True, images=images)
        assert hidden is not None
        return self._workspace.causal_logits(hidden.flatten(0, 1)).view(*tokens.shape, -1)

    @torch.no_grad()
    @in_turn
    def causal_step(self, state: CausalState, *, cache: FusedCache, rule: CausalRule) -> CausalState:
        """Read the last token and draw the next one in one graph; see `Denoiser.causal_step`."""
        fused, _ = self._check_prefix(state.token, cache, None)
        fused.catch_up()
        return self._reader.draw_token(state, fused, rule)

    def causal_steps(
        self, state: CausalState, num_tokens: int, *, cache: FusedCache, rule: CausalRule
    ) -> Iterator[tuple[CausalState, list[list[bool]]]]:
        """Draw tokens like `Denoiser.causal_steps`, but start each token before the flags of the last one are read."""
        waiting: list[tuple[CausalState, Tensor, torch.cuda.Event | None]] = []
        for number in range(num_tokens + 1):
            if number < num_tokens:
                state = self.causal_step(state, cache=cache, rule=rule)
                flags = torch.stack((state.done, state.broken))
                on_host = flags.to("cpu", non_blocking=True)
                arrived = torch.cuda.current_stream(flags.device).record_event() if flags.is_cuda else None
                waiting.append((state, on_host, arrived))
            if number > 0:
                before, on_host, arrived = waiting.pop(0)
                if arrived is not None:
                    arrived.synchronize()  # waits only for the copy
                yield before, on_host.tolist()

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
        self._stepper.finish()
        signal = self._workspace.soft_embedding(self_cond, canvas.shape)
        if self_cond_mask is not None:
            signal = signal * self_cond_mask.to(signal.dtype)[:, None, None]
        return self._stepper.denoise(canvas, signal, fused)

    @torch.no_grad()
    @in_turn
    def step(self, state: DenoiseState, *, cache: FusedCache, knobs: Knobs) -> tuple[DenoiseState, StepRecord]:
        """Take one denoising step by replaying graphs. Like `dgemma.step` it is pure, but logits are overwritten later.

        Example: `state, record = fast.step(state, cache=cache, knobs=knobs)`.
        """
        self._stepper.finish()  # first, because the device is idle until then
        fused = self._check_canvas(state.canvas, cache)
        return self._stepper.take_step(state, fused, knobs)

    @torch.no_grad()
    def read_ahead(self, values: Tensor) -> list[Any]:
        """Return `values.tolist()` while the device computes the soft embedding for the next step.

        Example: `left, broken, stray = fast.read_ahead(record.verdict)`.
        """
        with self.turn:
            on_host = values.to("cpu", non_blocking=True)
            arrived = torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None
            self._stepper.finish()
        if arrived is not None:
            arrived.synchronize()
        return on_host.tolist()

    @torch.no_grad()
    @in_turn
    def _read_block(self, tokens: Tensor, cache: FusedCache) -> None:
        self._reader.read(tokens, cache, None, last=False)
        cache.trim()

    def _check_canvas(self, canvas: Tensor, cache: FusedCache) -> FusedCache:
        own = self._own(cache)
        check_tokens(self._model, canvas, own, "canvas")
        return own

    def _check_prefix(
        self, tokens: Tensor, cache: FusedCache | None, attention_mask: Tensor | None, images: Images | None = None
    ) -> tuple[FusedCache, Tensor | None]:
        if images is not None:
            require_vision(self)
            if self._forward.batch_invariant:
                raise ValueError(
                    "FusedDenoiser images must be None with batch_invariant, because their attention depends on the "
                    "batch. Accelerate the model without batch_invariant."
                )
        fused = self.new_cache(tokens.shape[0]) if cache is None else self._own(cache)
        return fused, check_prefix(self._model, tokens, fused, attention_mask)

    def _own(self, cache: FusedCache) -> FusedCache:
        if not isinstance(cache, FusedCache) or cache.arena is not self._arena:
            raise ValueError(
                f"FusedDenoiser cache must come from this model, got a {type(cache).__name__} of another model. "
                "Encode the prefix with the accelerated model."
            )
        return cache
