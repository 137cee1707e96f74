"""Entropy-bound acceptance in plain PyTorch, the reference for `kernel`."""

import torch
from torch import Tensor

from dgemma.diffusion import draws
from dgemma_kernels.ops.accept.kernel import Accepted


def accept(
    entropy: Tensor,
    tokens: Tensor,
    argmax: Tensor,
    canvas: Tensor,
    open: Tensor,
    frozen: Tensor,
    draft: Tensor,
    done: Tensor,
    seeds: Tensor,
    block: Tensor,
    step: Tensor,
    num_steps: Tensor,
    recent: Tensor | None = None,
    ended: Tensor | None = None,
    *,
    bound: float,
    vocab_size: int,
    commit_canvas: bool = False,
    confidence: float = 0.0,
    compare_canvas: bool = False,
) -> Accepted:
    """Apply entropy-bound acceptance on uniform noise and the stop rule; arguments are (B, C) or (B,)."""
    charge = entropy.masked_fill(~open, 0.0)
    ascending, order = charge.sort(dim=-1, stable=True)
    within = ascending.cumsum(-1) - ascending <= bound
    done_row = done[:, None]
    decided = open & ~frozen & ~done_row
    accepted = torch.zeros_like(within).scatter(-1, order, within) & decided
    noise = draws.integers(draws.uniform(seeds, block, step, entropy.shape[1], "noise"), vocab_size)
    next_canvas = torch.where(decided, torch.where(accepted, tokens, noise), canvas)
    final = next_canvas if commit_canvas else torch.where(frozen, canvas, argmax)
    ignored = frozen if ended is None else frozen | ended
    next_done, next_recent = done | ignored.all(-1), None
    if recent is not None:
        stable = ((recent == argmax[:, None]) | ignored[:, None]).flatten(1).all(-1)
        mean_entropy = entropy.masked_fill(ignored, 0.0).sum(-1) / (~ignored).sum(-1).clamp(min=1)
        next_done = next_done | (stable & (mean_entropy < confidence))
        newest = next_canvas if compare_canvas else argmax
        next_recent = torch.cat((recent, newest[:, None]), dim=1)[:, 1:]
    shown = torch.where(decided, tokens, canvas)
    left = (num_steps - step - 1).clamp(min=0).masked_fill(next_done, 0)
    stray = ((shown < 0) | (shown >= vocab_size)).any(-1)
    return Accepted(
        canvas=next_canvas,
        open=torch.where(done_row, open, ~frozen),
        draft=torch.where(done_row, draft, final),
        done=next_done,
        recent=next_recent,
        accepted=accepted,
        renoised=decided & ~accepted,
        verdict=torch.stack((left, entropy.isnan().any(-1).long(), stray.long())),
    )
