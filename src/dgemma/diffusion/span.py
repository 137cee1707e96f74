"""The canvas that a caller passes for a whole run, and its part over one block."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Span:
    """The caller's canvas over all N positions of a run. None is the default of each field."""

    canvas: Tensor | None = None  # (B, N) int64, -1 for noise
    frozen: Tensor | None = None  # (B, N) bool
    # (B, N) bool: a canvas may end once these positions are finished; None means all. Only infilling sets it.
    awaited: Tensor | None = None
    allowed: Tensor | None = None  # (B or 1, N or 1, V) bool

    def may_end(self, block: int, canvas_len: int, rows: Tensor) -> Tensor:
        """The positions where a stop token may end a row: its last frozen one and those after it, (R, C) bool."""
        if self.frozen is None:
            return torch.ones(len(rows), canvas_len, dtype=torch.bool, device=rows.device)
        position = block * canvas_len + torch.arange(canvas_len, device=rows.device)
        column = torch.arange(self.frozen.shape[1], device=rows.device)
        last = torch.where(self.frozen[rows], column, -1).amax(-1, keepdim=True)  # (R, 1)
        return position >= last

    def to(self, device: torch.device) -> "Span":
        """The same span on `device`."""
        return Span(**{name: None if value is None else value.to(device) for name, value in vars(self).items()})

    def part(self, block: int, canvas_len: int, rows: Tensor) -> dict[str, Any]:
        """The fields over one block, for some rows. Positions after the end of the span are free."""
        start = block * canvas_len

        def cut(table: Tensor | None, free: int) -> Tensor | None:
            if table is None:
                return None
            part = table[rows, start : start + canvas_len]
            return F.pad(part, (0, canvas_len - part.shape[1]), value=free)

        has_canvas = self.canvas is not None and start < self.canvas.shape[1]  # without it, the block starts at level 1
        canvas = cut(self.canvas, -1) if has_canvas else None
        allowed = self.allowed
        if allowed is not None and allowed.shape[0] > 1:
            allowed = allowed[rows]
        if allowed is not None and allowed.shape[1] > 1:
            allowed = allowed[:, start : start + canvas_len]
            allowed = F.pad(allowed, (0, 0, 0, canvas_len - allowed.shape[1]), value=True)
        return {
            "canvas": canvas,
            "frozen": cut(self.frozen, False),
            "awaited": cut(self.awaited, False),
            "allowed": allowed,
        }
