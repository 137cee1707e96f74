"""What every kernel means, in plain PyTorch: the same names, signatures and shapes, in whatever dtype it is given."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.diffusion import draws
from dgemma.diffusion.prediction import Prediction
from dgemma_kernels.formats.float8 import Quantized, quantize
from dgemma_kernels.formats.packed import Packed
from dgemma_kernels.ops.accept.kernel import Accepted
from dgemma_kernels.ops.router.kernel import ExpertTiles, tokens_a_count
from dgemma_kernels.ops.vocabulary import kernel as vocabulary
from dgemma_kernels.ops.vocabulary.kernel import VocabularyStatistics

# The mixture-of-experts half of a layer: norms, router, experts, dense MLP.


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / rms(x), times `weight` unless None, in at least float32. x: (..., D), weight: (D,) → (..., D)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        wide = wide * weight.to(wide.dtype)
    return wide.to(x.dtype)


def attention_residual(
    attention: Tensor,
    residual: Tensor,
    post_weight: Tensor,
    dense_weight: Tensor,
    expert_weight: Tensor,
    router_scale: Tensor,
    eps: float,
    *,
    float8: bool = False,
) -> tuple[Tensor, Tensor, Tensor | Quantized, Tensor]:
    """(x, dense input, expert input, router input) from the attention's output. All (M, D); weights (D,)."""
    x = residual + rms_norm(attention, post_weight, eps)
    router = rms_norm(x, None, eps) * router_scale * x.shape[-1] ** -0.5
    expert = rms_norm(x, expert_weight, eps)
    return x, rms_norm(x, dense_weight, eps), quantize(expert) if float8 else expert, router


def layer_tail(
    residual: Tensor,
    dense: Tensor,
    expert_rows: Tensor,
    dense_weight: Tensor,
    expert_weight: Tensor,
    post_weight: Tensor,
    layer_scalar: Tensor,
    next_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(x, the next layer's normed input) from the dense output (M, D) and the experts' weighted rows (M, A, D)."""
    wide = expert_rows.to(torch.promote_types(expert_rows.dtype, torch.float32))
    moe = wide.sum(-2).to(residual.dtype)
    both = rms_norm(dense, dense_weight, eps) + rms_norm(moe, expert_weight, eps)
    x = (residual + rms_norm(both, post_weight, eps)) * layer_scalar[:, None]
    return x, rms_norm(x, next_weight, eps)


def route(
    router_input: Tensor, proj: Tensor, per_expert_scale: Tensor, num_active: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's experts, largest first. (M, D), (E, D), (E,) → weights (M, A), index (M, A) int32, counts (N, E)."""
    scores = router_input @ proj.T
    probabilities = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    # A stable sort, unlike topk, promises that of equal probabilities the lower expert wins.
    top, index = probabilities.sort(dim=-1, descending=True, stable=True)
    top, index = top[:, :num_active], index[:, :num_active]
    weights = top / top.sum(-1, keepdim=True) * per_expert_scale[index]
    return weights.to(probabilities.dtype), index.int(), count_pairs(index, proj.shape[0])


def count_pairs(index: Tensor, num_experts: int) -> Tensor:
    """How many of each `router.tokens_a_count` tokens chose an expert. index: (M, A) → (N, E) int32."""
    chunks = index.long().split(tokens_a_count(index.shape[0]))
    return torch.stack([chunk.flatten().bincount(minlength=num_experts) for chunk in chunks]).int()


def sort_by_expert(index: Tensor, counts: Tensor, rows_per_tile: int) -> ExpertTiles:
    """The (token, k) pairs sorted by expert and cut into tiles. index: (M, A) int32, counts: (N, E) int32."""
    pairs = index.flatten().argsort(stable=True).int()
    num_experts = counts.shape[1]
    tiles, first = [], 0
    for expert, count in enumerate(counts.sum(0).tolist()):
        tiles += [(expert, first + at, min(count - at, rows_per_tile)) for at in range(0, count, rows_per_tile)]
        first += count
    max_tiles = index.numel() // rows_per_tile + min(num_experts, index.numel())
    tiles += [(0, 0, 0)] * (max_tiles - len(tiles))
    table = torch.tensor(tiles, dtype=torch.int32, device=index.device)
    finished = torch.zeros(max_tiles, dtype=torch.int32, device=index.device)
    return ExpertTiles(pairs, table, finished, num_experts, index.shape[1], rows_per_tile)


def geglu(gate_up: Tensor) -> Tensor:
    """gelu_tanh of the first half, times the second. (M, 2F) → (M, F)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gate_up_geglu(x: Tensor, gate_up_weight: Tensor) -> Tensor:
    """geglu(x @ gate_up_weight.T). (M, D), (2F, D) → (M, F)."""
    return geglu(x @ gate_up_weight.T)


def dense_mlp(x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, progress: Tensor) -> Tensor:
    """gate_up_geglu(x) @ down_weight.T; nothing is counted in `progress`. (M, D), (2F, D), (D, F), (2,) → (M, D)."""
    return gate_up_geglu(x, gate_up_weight) @ down_weight.T


def expert_gate_up(x: Tensor | Quantized, gate_up_proj: Tensor | Quantized | Packed, tiles: ExpertTiles) -> Tensor:
    """geglu(x[token] @ gate_up_proj[expert].T) in the order of `tiles.pairs`. (M, D), (E, 2F, D) → (M * A, F).

    What is quantised is multiplied in float64, and the result is not rounded.
    """
    x, gate_up_proj = _widen(x), _widen(gate_up_proj)
    rows = []
    for expert, first, count in tiles.tiles.tolist():
        tokens = tiles.pairs[first : first + count].long() // tiles.num_active
        rows.append(geglu(x[tokens] @ gate_up_proj[expert].T))
    return torch.cat(rows)


def expert_down(
    hidden: Tensor | Quantized,
    down_proj: Tensor | Quantized | Packed,
    weights: Tensor,
    tiles: ExpertTiles,
    *,
    overlap: bool = False,
) -> Tensor:
    """weights[pair] * (hidden @ down_proj[expert].T) at the pair's place. (M * A, F), (E, D, F), (M, A) → (M, A, D)."""
    hidden, down_proj = _widen(hidden), _widen(down_proj)
    out = hidden.new_empty(hidden.shape[0], down_proj.shape[1])
    for expert, first, count in tiles.tiles.tolist():
        pairs = tiles.pairs[first : first + count].long()
        rows = hidden[first : first + count] @ down_proj[expert].T
        out[pairs] = (rows * weights.flatten()[pairs, None]).to(hidden.dtype)
    return out.view(-1, tiles.num_active, down_proj.shape[1])


def _widen(x: Tensor | Quantized | Packed) -> Tensor:
    if isinstance(x, Packed):
        return x.unpack()
    return x.dequantize() if isinstance(x, Quantized) else x


# The attention half of a layer and the vocabulary side: q/k/v, attention, statistics, samples, acceptance.


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    canvas_len: int = 0,
    keep: int = 0,
) -> Tensor:
    """T query tokens attend to prefix and themselves. (B, T, N, H), (B, K, capacity, H) twice, (B,) → (B, T, N, H)."""
    num_tokens, group = queries.shape[1], queries.shape[2] // keys.shape[1]
    slot = torch.arange(keys.shape[2], device=keys.device)
    own = length[:, None] + torch.arange(num_tokens, device=keys.device)  # (B, T): each query's slot
    last = own if causal else (length[:, None] + num_tokens - 1).expand_as(own)
    seen = slot <= last[..., None]  # (B, T, capacity)
    if window is not None:
        seen = seen & (slot > own[..., None] - window)
    if canvas_len:
        start = length[:, None, None] + num_tokens - canvas_len  # (B, 1, 1): the canvas's first slot
        from_canvas = (slot < start + canvas_len) & ((slot >= start - keep) if window is not None else True)
        seen = torch.where(own[..., None] >= start, from_canvas, seen)
    used = (slot < length[:, None] + num_tokens)[:, None, :, None]  # what lies beyond may be anything, even NaN
    keys = keys.masked_fill(~used, 0.0).repeat_interleave(group, 1)
    values = values.masked_fill(~used, 0.0).repeat_interleave(group, 1)
    scores = (queries.transpose(1, 2) @ keys.transpose(2, 3)).masked_fill(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(queries.dtype)
    return (weights @ values).transpose(1, 2).contiguous()


def prepare_qkv(
    projected: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    inv_freq: Tensor,
    start: Tensor,
    length: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    eps: float,
) -> Tensor:
    """Norm per head, rotate q and k, write k and v at slots length + [0, T). Returns the queries (B, T, N, H)."""
    batch, kv_heads, _, head_dim = keys.shape
    heads = projected.unflatten(1, (-1, head_dim)).unflatten(0, (batch, -1))  # (B, T, heads, H)
    query, key, value = heads[:, :, :num_heads], heads[:, :, num_heads : num_heads + kv_heads], heads[:, :, -kv_heads:]
    offset = torch.arange(heads.shape[1], device=keys.device)
    angle = (start[:, None] + offset)[..., None].to(inv_freq.dtype) * inv_freq  # (B, T, H / 2)
    cos, sin = (torch.cat([part, part], -1).to(projected.dtype)[:, :, None] for part in (angle.cos(), angle.sin()))

    def rotate(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    slot = (length[:, None] + offset)[:, None, :, None].expand(-1, kv_heads, -1, head_dim)
    keys.scatter_(2, slot, rotate(rms_norm(key, key_weight, eps)).transpose(1, 2))
    values.scatter_(2, slot, rms_norm(value, None, eps).transpose(1, 2))
    return rotate(rms_norm(query, query_weight, eps)).contiguous()


def _processed(logits: Tensor, temperature: Tensor, softcap: float | None, allowed: Tensor | None) -> Tensor:
    num_rows, vocab_size = logits.shape
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        x = torch.tanh(x / softcap) * softcap
    if allowed is not None:
        bits = (allowed[:, :, None] >> torch.arange(32, device=allowed.device)) & 1
        mask = bits.flatten(1)[:, :vocab_size].bool().repeat_interleave(num_rows // allowed.shape[0], 0)
        x = x.masked_fill(~mask, -torch.inf)
    return x / temperature.repeat_interleave(num_rows // temperature.shape[0])[:, None].to(x.dtype)


def vocabulary_statistics(
    logits: Tensor, temperature: Tensor, *, softcap: float | None = 30.0, allowed: Tensor | None = None
) -> VocabularyStatistics:
    """Statistics of softmax(cap(logits) / temperature): logits (R, V), temperature (B,) with B dividing R."""
    x = _processed(logits, temperature, softcap, allowed)
    chunk = vocabulary.CHUNK
    padded = F.pad(x, (0, -x.shape[1] % chunk), value=-torch.inf).unflatten(1, (-1, chunk))
    chunk_best = padded.amax(-1)
    shift = chunk_best.masked_fill(chunk_best == -torch.inf, 0.0)
    best = x.amax(-1)
    log_normalizer = x.logsumexp(-1)
    log_probs = x - log_normalizer[:, None]
    probabilities = log_probs.exp()
    top = probabilities.topk(min(2, x.shape[1]), dim=-1).values
    rounded = x.to(logits.dtype).to(x.dtype)
    return VocabularyStatistics(
        entropy=-(probabilities * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(-1),
        argmax=x.argmax(-1),
        confidence=top[:, 0],
        margin=top[:, 0] - (top[:, 1] if x.shape[1] > 1 else 0.0),
        log_normalizer=log_normalizer,
        best=best,
        soft_normalizer=(rounded - rounded.amax(-1, keepdim=True)).exp().sum(-1),
        chunk_best=chunk_best,
        chunk_sum=(padded - shift[..., None]).exp().sum(-1),
    )


def sample(
    logits: Tensor,
    statistics: VocabularyStatistics,
    u: Tensor,
    temperature: Tensor,
    *,
    softcap: float | None = 30.0,
    allowed: Tensor | None = None,
) -> Tensor:
    """Inverse CDF in vocabulary order, one uniform a row: u (R,) float64 → tokens (R,)."""
    prediction = Prediction(_processed(logits, temperature, softcap, allowed)[None])
    return prediction.sample(u[None])[0]


def soft_probabilities(
    logits: Tensor,
    statistics: VocabularyStatistics,
    temperature: Tensor,
    *,
    softcap: float | None = 30.0,
    allowed: Tensor | None = None,
) -> Tensor:
    """softmax of the processed logits rounded to their dtype, (R, V) in that dtype."""
    x = _processed(logits, temperature, softcap, allowed)
    return x.to(logits.dtype).softmax(-1, dtype=x.dtype).to(logits.dtype)


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
    *,
    bound: float,
    vocab_size: int,
    commit_canvas: bool = False,
    confidence: float = 0.0,
    compare_canvas: bool = False,
) -> Accepted:
    """Entropy-bound acceptance on uniform noise, the stable-and-confident stop rule, the verdict; (B, C) or (B,)."""
    charge = entropy.masked_fill(~open, 0.0)
    ascending, order = charge.sort(dim=-1, stable=True)
    within = ascending.cumsum(-1) - ascending <= bound
    done_row = done[:, None]
    decided = open & ~frozen & ~done_row
    accepted = torch.zeros_like(within).scatter(-1, order, within) & decided
    noise = draws.integers(draws.uniform(seeds, block, step, entropy.shape[1], "noise"), vocab_size)
    next_canvas = torch.where(decided, torch.where(accepted, tokens, noise), canvas)
    final = next_canvas if commit_canvas else torch.where(frozen, canvas, argmax)
    next_done, next_recent = done | frozen.all(-1), None
    if recent is not None:
        stable = ((recent == argmax[:, None]) | frozen[:, None]).flatten(1).all(-1)
        mean_entropy = entropy.masked_fill(frozen, 0.0).sum(-1) / (~frozen).sum(-1).clamp(min=1)
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


# The stack's first input, and the cache.


def embed(
    tokens: Tensor, table: Tensor, next_weight: Tensor, update: Tensor | None, *, scale: float, norm: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """x = table[tokens] * scale + update, normed where asked, and its norm times next_weight. (M,) → (M, D) twice."""
    x = table[tokens] * scale
    if update is not None:
        x = x + update
    if norm:
        x = rms_norm(x, None, eps)
    return x, rms_norm(x, next_weight, eps)


def forget(keys: Tensor, values: Tensor, held: Tensor, keep: int) -> None:
    """Each row's last `keep` of held[b] tokens move to its front, in place. (layers, B, K, capacity, H), (B,)."""
    for row, count in enumerate(held.tolist()):
        for tensor in (keys, values):
            if count > keep:
                tensor[:, row, :, :keep] = tensor[:, row, :, count - keep : count].clone()
