"""Own steps: cross-entropy of the answer on the canvases that the model's own steps lead to (DAgger, arXiv:1011.0686).

Training on random noise shows canvases that a sampler never makes, and never those of its mistakes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.checks import Checked, Count, require_field
from dgemma.diffusion.noise import Noise
from dgemma.model.diffusion import DiffusionGemma
from dgemma.run.knobs import Knobs
from dgemma.run.step import start_state, step
from dgemma.train.batch import TrainBatch
from dgemma.train.canvases import cut_canvases, draw_choice
from dgemma.train.objective import flags_of_ids


@dataclass(frozen=True, kw_only=True)
class OwnSteps(Checked):
    """The mean cross-entropy of an answer over `steps` steps from pure noise, for `RowMean`.

    Each step is that of `generate` with these knobs, so a model learns to be right early and to continue from its own
    canvases. The gradient also passes through self-conditioning, from each step to those before.

    Only for prompts with one right answer. The model's tokens say nothing about the text of the data, so a prompt with
    several answers teaches their mean on every canvas.

    Example: `objective = RowMean(OwnSteps(noise=noise, canvas_len=81, steps=4, knobs=knobs))`.
    """

    noise: Noise
    canvas_len: Count
    steps: Count
    knobs: Knobs
    fill_token: int = 1  # end-of-text, after the end of an answer
    allowed: tuple[int, ...] | None = None  # the ids that noise and predictions are restricted to

    def __post_init__(self) -> None:
        super().__post_init__()
        cuts = self.knobs.top_k is not None or self.knobs.top_p is not None
        fix = "They may exclude the answer, whose loss is then infinite."
        require_field(not cuts, self, "knobs", "have neither top_k nor top_p", fix)

    def __call__(self, model: DiffusionGemma, batch: TrainBatch, seeds: Tensor) -> Tensor:
        """Return the loss of one canvas of each row, (B,)."""
        canvases = cut_canvases(
            batch, canvas_len=self.canvas_len, fill_token=self.fill_token, choose=draw_choice(seeds), causal_scope=None
        )
        x, frozen, scored = (each[:, 0] for each in (canvases.x, canvases.frozen, canvases.scored))
        prefix = canvases.tokens[:, : canvases.prefix_len]
        is_read = torch.arange(canvases.prefix_len, device=seeds.device) < canvases.starts
        cache = model.encode(prefix, None, None if canvases.aligned else is_read)
        state = start_state(
            self.knobs,
            self.noise,
            seeds=seeds,
            canvas_len=self.canvas_len,
            num_steps=self.steps,
            canvas=torch.where(frozen, x, -1),
            frozen=frozen,
            allowed=None if self.allowed is None else flags_of_ids(self.allowed, self.noise.vocab_size, seeds.device),
        )
        costs = torch.zeros(x.shape, device=seeds.device)
        for _ in range(self.steps):
            decides = scored & state.open & ~state.done[:, None]
            state, record = step(model, state, cache=cache, knobs=self.knobs)
            costs = costs - torch.where(decides, record.prediction.log_prob(x), 0.0)
        return costs.sum(1) / (self.steps * scored.sum(1).clamp(min=1))
