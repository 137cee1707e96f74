"""Experts with adapters."""

from collections.abc import Iterator

from torch import Tensor, nn

from dgemma.doors import replaceable
from dgemma.model.config import GenerationDefaults
from dgemma.model.experts import Experts, Routing, product_by_group
from dgemma.train.lora.linear import LoRA, new_pair


class AdaptedExperts(Experts):
    """Experts whose every product gains scale · B_e A_e x."""

    base_generation: GenerationDefaults

    def __init__(self, base: Experts, lora: LoRA) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj, self.down_proj, self.lora = base.gate_up_proj, base.down_proj, lora
        self.gate_up_lora_a, self.gate_up_lora_b = new_pair(base.gate_up_proj, lora.rank)
        self.down_lora_a, self.down_lora_b = new_pair(base.down_proj, lora.rank)

    @replaceable
    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        return super().forward(x, routing)

    def gate_up(self, rows: Tensor, ends: Tensor) -> Tensor:
        return super().gate_up(rows, ends) + self._adapter(rows, self.gate_up_lora_a, self.gate_up_lora_b, ends)

    def down(self, rows: Tensor, ends: Tensor) -> Tensor:
        return super().down(rows, ends) + self._adapter(rows, self.down_lora_a, self.down_lora_b, ends)

    def _adapter(self, rows: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        """Return scale · B_e A_e row for rows (R, I) grouped by expert: (R, O)."""
        narrow = product_by_group(rows, a.to(rows.dtype), ends)  # (R, rank)
        return product_by_group(self.lora.scale * narrow, b.to(narrow.dtype), ends)

    def updates(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each base weight in this module, and the update of its adapter."""
        yield "gate_up_proj", self.gate_up_lora_b @ self.gate_up_lora_a * self.lora.scale
        yield "down_proj", self.down_lora_b @ self.down_lora_a * self.lora.scale

    def base(self) -> Experts:
        """Return the experts without their adapters."""
        experts = Experts.__new__(Experts)
        nn.Module.__init__(experts)
        experts.gate_up_proj, experts.down_proj = self.gate_up_proj, self.down_proj
        return experts
