"""How a batch's answers are cut into canvases, and which of their tokens are scored: all that is known before noise.

Canvases start at the prompt's end, in steps of the canvas length. The last, partial one is filled with end-of-text; a
canvas without a token of the answer is padding. Rows without an answer have one such canvas, of which nothing counts.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.train.batch import TrainBatch


@dataclass(frozen=True, kw_only=True)
class Canvases:
    """K canvases of C tokens for each of B rows, and the text they are cut from.

    `prefix_len` bounds the clean tokens that a canvas looks at, `causal_len` those with a successor to be scored; the
    host knows both. `aligned`: one canvas, at `prefix_len` in every row.
    """

    tokens: Tensor  # (B, T) filled
    index: Tensor  # (B, K) which canvas of its answer
    starts: Tensor  # (B, K) positions
    x: Tensor  # (B, K, C) clean
    pinned: Tensor  # (B, K, C) bool
    scored: Tensor  # (B, K, C) bool
    fill: Tensor  # (B, K, C) bool: behind a text's end
    causal_scored: Tensor  # (B, causal_len) bool: the successor of each token
    documents: Tensor | None  # (B, T)
    canvas_documents: Tensor | None  # (B, K, C)
    prefix_len: int
    causal_len: int
    aligned: bool

    @property
    def packing(self) -> tuple[Tensor, Tensor] | None:
        """The documents of the text (B, T) and of the canvases (B, K, C), for `predict_canvases`."""
        if self.documents is None or self.canvas_documents is None:
            return None
        return self.documents, self.canvas_documents

    def check_positions(self, max_positions: int) -> None:
        """Refuse rows that the model has no positions for."""
        if self.tokens.shape[1] > max_positions:
            raise ValueError(
                f"TrainBatch.tokens must end, filled, within max_position_embeddings {max_positions}, got "
                f"{self.tokens.shape[1]}. Cut the rows."
            )


def cut_canvases(
    batch: TrainBatch,
    *,
    canvas_len: int,
    fill_token: int,
    choose: Tensor | None,
    truncated: str,
    causal_scope: str | None,
    causal_fill: bool,
) -> Canvases:
    """Cut a batch. choose (B,) in [0, 1) picks one canvas of each row, None takes all.

    truncated: a cut answer's fill is "scored" all the same or "unscored", or the whole row is "rejected". causal_scope:
    whether the causal term scores the "sequence", only the "answer", or None; causal_fill: whether the fill, too.
    """
    lengths, prompt_len = batch.length, batch.prompt_len
    answer_len = (lengths - prompt_len).clamp(min=0)
    num_canvases = (answer_len + canvas_len - 1) // canvas_len  # (B,)
    ends = prompt_len + num_canvases * canvas_len
    cut_off = torch.zeros_like(lengths, dtype=torch.bool) if batch.truncated is None else batch.truncated
    kept = ~cut_off if truncated == "rejected" else torch.ones_like(cut_off)
    scored_ends = torch.where(cut_off, lengths, ends) if truncated == "unscored" else ends

    # Sizes come from what the host knows, so that nothing waits for the device and shapes repeat.
    assert batch.spans is not None
    blocks = {(prompt, max(0, -((prompt - length) // canvas_len))) for prompt, length in set(batch.spans)}
    most = max(1, *(count for _, count in blocks))
    num_tokens = max(1, *(prompt + count * canvas_len for prompt, count in blocks))
    last_starts = {prompt + (count - 1) * canvas_len for prompt, count in blocks if count > 0}
    causal_ends = torch.zeros_like(ends)
    causal_end = 0
    if causal_scope is not None:
        causal_ends = torch.where(kept, scored_ends if causal_fill else lengths, 0)
        causal_end = num_tokens if causal_fill else max(length for _, length in batch.spans)

    device = batch.tokens.device
    position = torch.arange(num_tokens, device=device)
    tokens = _fit(batch.tokens, num_tokens, fill_token)
    tokens = torch.where(position < lengths[:, None], tokens, fill_token)
    pinned = _fit(batch.pinned, num_tokens, False) if batch.pinned is not None else torch.zeros_like(tokens).bool()
    fill = position >= lengths[:, None]
    if batch.fill is not None:
        fill = fill | _fit(batch.fill, num_tokens, True)
    # The fill belongs to the text it ends.
    documents = None
    if batch.documents is not None:
        last_token = position.clamp(max=(batch.tokens.shape[1] - 1)).expand_as(tokens)
        documents = batch.documents.gather(1, torch.minimum(last_token, (lengths - 1).clamp(min=0)[:, None]))

    if choose is None:
        index = torch.arange(most, device=device).expand(batch.batch_size, -1)
    else:
        index = torch.minimum((choose * num_canvases).long(), (num_canvases - 1).clamp(min=0))[:, None]
    starts = prompt_len[:, None] + index * canvas_len
    where = starts[..., None] + torch.arange(canvas_len, device=device)  # (B, K, C)
    valid = (index < num_canvases[:, None]) & kept[:, None]
    inside = where.clamp(max=num_tokens - 1)

    def of_canvases(values: Tensor) -> Tensor:
        return values.gather(1, inside.flatten(1)).view_as(inside)

    canvas_pinned = of_canvases(pinned) & valid[..., None]
    successor = slice(1, max(causal_end, 1))
    causal_scored = (position[successor] < causal_ends[:, None]) & ~pinned[:, successor]
    if not causal_fill:
        causal_scored &= ~fill[:, successor]
    if causal_scope == "answer":
        causal_scored &= position[successor] >= prompt_len[:, None]
    if documents is not None:
        causal_scored &= documents[:, successor] == documents[:, : causal_scored.shape[1]]
    return Canvases(
        tokens=tokens,
        index=index,
        starts=starts,
        x=of_canvases(tokens),
        pinned=canvas_pinned,
        scored=valid[..., None] & (where < scored_ends[:, None, None]) & ~canvas_pinned,
        fill=of_canvases(fill),
        causal_scored=causal_scored,
        documents=documents,
        canvas_documents=None if documents is None else of_canvases(documents),
        prefix_len=max(last_starts, default=0),
        causal_len=max(causal_end - 1, 0),
        aligned=most == 1 and len(last_starts) == 1 and all(count > 0 for _, count in blocks),
    )


def _fit(values: Tensor, num_tokens: int, fill: int | bool) -> Tensor:
    """(B, T) cut or filled to num_tokens."""
    return F.pad(values[:, :num_tokens], (0, max(0, num_tokens - values.shape[1])), value=fill)
