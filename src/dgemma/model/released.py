"""Models whose experts `dgemma_kernels.accelerate(release=True)` has moved out."""

from typing import Any, NoReturn

from torch import nn

from dgemma.model.diffusion import DiffusionGemma


class ReleasedExperts(nn.Module):
    """Placeholder for experts that were moved out."""

    def forward(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            "accelerate(release=True) has taken the experts out of this model. Use the model it returned, or load this "
            "one again."
        )

    def _save_to_state_dict(self, *_: Any) -> NoReturn:
        self.forward()  # a state dict would lack the experts

    def _load_from_state_dict(self, *_: Any) -> NoReturn:
        self.forward()


def require_experts(model: nn.Module, owner: str) -> None:
    """Refuse a model that is not a DiffusionGemma, or whose experts were moved out."""
    if not isinstance(model, DiffusionGemma):
        raise TypeError(f"{owner} model must be a DiffusionGemma, got {type(model).__name__}. Load one.")
    if any(isinstance(module, ReleasedExperts) for module in model.modules()):
        raise ValueError(
            f"{owner} model must have its experts, which accelerate(release=True) has taken out. Load the model again, "
            "or accelerate it without release."
        )
