"""The vocabulary pass in plain PyTorch, the reference for `kernel`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.diffusion.prediction import Prediction
from dgemma_kernels.formats.float8 import quantize
from dgemma_kernels.ops.vocabulary import kernel
from dgemma_kernels.ops.vocabulary.kernel import Shaping, SoftProbabilities, VocabularyStatistics


def vocabulary_statistics(logits: Tensor, shaping: Shaping) -> VocabularyStatistics:
    """Compute statistics of the shaped logits (R, V)."""
    x = _processed(logits, shaping)
    chunk = kernel.CHUNK
    padded = F.pad(x, (0, -x.shape[1] % chunk), value=-torch.inf).unflatten(1, (-1, chunk))
    chunk_best = padded.amax(-1)
    shift = chunk_best.masked_fill(chunk_best == -torch.inf, 0.0)
    best = x.amax(-1)
    log_normalizer = x.logsumexp(-1)
    log_probs = x - log_normalizer[:, None]
    probabilities = log_probs.exp()
    top = probabilities.topk(min(2, x.shape[1]), dim=-1).values
    return VocabularyStatistics(
        entropy=-(probabilities * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(-1),
        argmax=x.argmax(-1),
        confidence=top[:, 0],
        margin=top[:, 0] - (top[:, 1] if x.shape[1] > 1 else 0.0),
        log_normalizer=log_normalizer,
        best=best,
        chunk_best=chunk_best,
        chunk_sum=(padded - shift[..., None]).exp().sum(-1),
    )


def kth_largest(logits: Tensor, k: int) -> Tensor:
    """Return the k-th largest logit of each row, the smallest one if there are fewer: (R, V) → (R,)."""
    return logits.topk(min(k, logits.shape[1]), dim=-1).values[:, -1]


def nucleus_floor(logits: Tensor, shaping: Shaping, p: float) -> Tensor:
    """Return the largest logit of each row such that it and larger ones have the probability `p`, (R, V) → (R,)."""
    ordered, order = _processed(logits, shaping).sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    num_kept = (probabilities.cumsum(-1) - probabilities < p).sum(-1, keepdim=True)
    return logits.gather(1, order.gather(1, (num_kept - 1).clamp(min=0)))[:, 0]


def sample(logits: Tensor, statistics: VocabularyStatistics, u: Tensor, shaping: Shaping) -> Tensor:
    """Sample by inverse CDF in vocabulary order, one uniform per row: u (R,) float64 → tokens (R,)."""
    return Prediction(_processed(logits, shaping)[None]).sample(u[None])[0]


def soft_probabilities(
    logits: Tensor, statistics: VocabularyStatistics, shaping: Shaping, *, float8: bool = False
) -> SoftProbabilities:
    """Return the softmax of the processed logits rounded to their dtype, (R, V) in that dtype or in float8."""
    x = _processed(logits, shaping).to(logits.dtype)
    probabilities = x.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
    if float8:
        rounded = quantize(probabilities)
        return SoftProbabilities(rounded.values, rounded.scale)
    scale = probabilities.amax(-1)
    return SoftProbabilities((probabilities / scale[:, None]).to(x.dtype), scale)


def _processed(logits: Tensor, shaping: Shaping) -> Tensor:
    temperature, softcap, allowed, bias, floor = shaping
    num_rows, vocab_size = logits.shape
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        x = torch.tanh(x / softcap) * softcap
    if allowed is not None:
        bits = (allowed[:, :, None] >> torch.arange(32, device=allowed.device)) & 1
        mask = bits.flatten(1)[:, :vocab_size].bool().repeat_interleave(num_rows // allowed.shape[0], 0)
        x = x.masked_fill(~mask, -torch.inf)
    if floor is not None:
        x = x.masked_fill(logits < floor[:, None], -torch.inf)
    x = x / temperature.repeat_interleave(num_rows // temperature.shape[0])[:, None].to(x.dtype)
    return x if bias is None else x + bias.values[:, bias.token_class.long()].to(x.dtype)
