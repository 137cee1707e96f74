"""Moving a sliding layer's newest tokens to the front of its buffer. Reference: `reference.py`."""

import triton
import triton.language as tl
from torch import Tensor


def forget(keys: Tensor, values: Tensor, lengths: Tensor, keep: int) -> None:
    """Move each row's last `keep` tokens to the front of its buffer, in place, in every layer.

    keys, values: (layers, B, K, capacity, H) contiguous; row b has its tokens in the slots [0, lengths[b]). lengths:
    (B,) int64, not changed.

    Example: `forget(keys, values, lengths, 1023); lengths.clamp_(max=1023)`.
    """
    num_layers, batch, kv_heads, capacity, head_dim = keys.shape
    cols = min(head_dim, 32)
    # Only the first axis of a grid may exceed 65,535, which 25 layers of 8 heads do at 328 rows.
    _forget_kernel[(num_layers * batch * kv_heads * (head_dim // cols), 2)](
        keys,
        values,
        lengths,
        keep,
        batch * kv_heads,
        capacity,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        COLS=cols,
        SLOTS=128,
    )


@triton.jit
def _forget_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    lengths: tl.tensor,
    keep: tl.tensor,
    num_heads: tl.tensor,  # B·K
    capacity: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLS: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    head = tl.program_id(0) // (HEAD_DIM // COLS)  # of (layers, B, K)
    shift = tl.maximum(tl.load(lengths + head % num_heads // KV_HEADS) - keep, 0)
    if shift > 0:
        if tl.program_id(1) == 0:
            base = keys
        else:
            base = values
        cols = tl.program_id(0) % (HEAD_DIM // COLS) * COLS + tl.arange(0, COLS)
        base += head.to(tl.int64) * capacity * HEAD_DIM
        # One program moves its columns block by block from the front, so it reads every slot before it overwrites it.
        for start in range(0, keep, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            mask = (slot < keep)[:, None]
            target = base + slot[:, None] * HEAD_DIM + cols[None, :]
            moved = tl.load(target + shift * HEAD_DIM, mask=mask)
            tl.debug_barrier()
            tl.store(target, moved, mask=mask)
