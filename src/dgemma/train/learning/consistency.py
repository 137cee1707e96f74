"""Consistency: the model at one noise level learns from a teacher that sees the same canvas with less noise.

For mask noise this is posterior-bridge consistency (CDLM, arXiv:2605.00161), and for uniform noise its discrete twin.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.checks import Probability
from dgemma.model.diffusion import DiffusionGemma
from dgemma.train import head
from dgemma.train.canvases import EARLIER_EVENT, EARLIER_TOKEN, Canvases, NoisyCanvases, draw
from dgemma.train.lora import start_weights
from dgemma.train.losses import Loss, Scored
from dgemma.train.one_pass import run_text_and_canvases


@dataclass(frozen=True, kw_only=True)
class Consistency(Loss):
    """KL(teacher(z_s) ‖ model(z_t)), where z_s follows from z_t by one exact reverse step to a lower noise level.

    The step draws from q(z_s | z_t, x), with the clean text x, so that z_s and z_t lie on one path. Given z_t, the mean
    of the exact posteriors p(x | z_s) is p(x | z_t). So the exact posterior is the fixed point, for every noise. A
    token that z_s reveals under mask noise is its own target.

    The texts may come from the teacher's own slow runs. Then no answers are needed, and the model learns to predict
    at once what the teacher finds in many steps.

    - teacher: a copy of the model, made before training. With adapters, None is the model without them.
    - share: of the noise level that remains after the step; 0 makes this the cross-entropy of x.
    - self_cond_off: as in `Objective`.

    Example: `Objective(noise=MaskNoise(512), canvas_len=32, loss=Consistency(teacher=copy.deepcopy(model)))`.
    """

    teacher: DiffusionGemma | None = field(default=None, repr=False)
    share: Probability = 0.5
    scored: Scored = "all"
    self_cond_off: Literal["zero_signal", "zero_logits"] = "zero_signal"

    def __call__(self, model: DiffusionGemma, canvases: Canvases, noisy: NoisyCanvases, hidden: Tensor) -> Tensor:
        return self.costs(model, canvases, self.step_back(canvases, noisy), hidden)

    def step_back(self, canvases: Canvases, noisy: NoisyCanvases) -> NoisyCanvases:
        """Return the canvases after one exact reverse step, to `share` of their noise level."""
        level = noisy.position_level
        sizes = dict.fromkeys((EARLIER_EVENT, EARLIER_TOKEN), level.shape[-1])
        u_event, u_token = draw(noisy.seeds, canvases.index, sizes)
        clean, stay = noisy.noise.routes(canvases.x, noisy.z, level, self.share * level, allowed=noisy.allowed)
        fresh = noisy.noise.refill(u_token, self.share * level, allowed=noisy.allowed)
        z = torch.where(u_event < clean, canvases.x, torch.where(u_event < clean + stay, noisy.z, fresh))
        # As in `generate`, a teacher that was trained with self-conditioning always sees its first prediction.
        self_cond = None if noisy.self_cond is None else torch.ones_like(noisy.self_cond)
        z = torch.where(canvases.frozen, canvases.x, z)
        return noisy._replace(z=z, level=self.share * noisy.level, self_cond=self_cond)

    def costs(self, model: DiffusionGemma, canvases: Canvases, earlier: NoisyCanvases, hidden: Tensor) -> Tensor:
        """Return the divergence at each position, (B, K, C). hidden: the last hidden states of the noisier canvases."""
        with torch.no_grad(), start_weights(model, self.teacher, "Consistency.teacher") as teacher:
            seen = run_text_and_canvases(teacher, canvases, earlier, self_cond_off=self.self_cond_off).canvases
            weight, teacher_cap = teacher.embed_tokens.weight.detach(), teacher.config.final_logit_softcapping
        assert seen is not None
        is_mask = earlier.noise.masked(torch.arange(len(weight), device=weight.device))
        if earlier.noise.kind == "mask":
            is_known = ~earlier.noise.masked(earlier.z)
        else:
            is_known = torch.full_like(canvases.frozen, self.share == 0)

        def divergence(logits: Tensor, seen: Tensor, x: Tensor, is_known: Tensor) -> Tensor:
            taught = (F.linear(seen, weight).to(logits.dtype) / teacher_cap).tanh() * teacher_cap
            target = taught.masked_fill(is_mask, -torch.inf).softmax(-1)
            target = torch.where(is_known[:, None], F.one_hot(x, len(is_mask)), target)
            log_prob = logits.masked_fill(is_mask, -torch.inf).log_softmax(-1)
            return torch.where(target > 0, target * (target.log() - log_prob), 0.0).sum(-1)

        costs = head.map_logits(
            divergence,
            hidden.flatten(0, 2),
            model.embed_tokens.weight,
            seen.flatten(0, 2),
            canvases.x.flatten(),
            is_known.flatten(),
            cap=model.config.final_logit_softcapping,
        )
        return costs.view_as(canvases.x)
