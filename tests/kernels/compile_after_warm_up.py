"""Prints, a line each, the kernels that calls of several settings would compile after a warm-up. Nothing is launched.

Run it in a separate process, without TRITON_INTERPRET. Results of kernels are missing, so the canvases mean nothing.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from absent_gpu import absent_gpu
from triton.runtime.jit import JITFunction

import dgemma
from dgemma.constraints.token_automaton import TokenAutomaton
from dgemma.sampling import Ancestral
from dgemma_kernels import accelerate
from dgemma_kernels.engine import denoiser
from kernel_inputs import make_model


class Count(dgemma.Regex):
    """A token of class k leads k states further, and the text ends in the first state, like one of zeros."""

    def __init__(self, num_states: int, num_classes: int) -> None:
        table = (np.arange(num_states)[:, None] + np.arange(num_classes)) % num_states
        automaton = TokenAutomaton(np.arange(512) % num_classes, table, np.arange(num_states) == 0)
        self.__dict__.update(automaton=automaton, pattern="", tokenizer=None)


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"stop": None},
    {"top_k": 9},
    {"top_p": 0.9},
    {"top_k": 9, "top_p": 0.9},
    {"sampler": Ancestral()},
    {"sampler": dgemma.EntropyBound(greedy=True), "temperature": 1.0},
    {"max_new_tokens": 64},
    {"allowed": range(400)},
    {"allowed": [range(400)] * 32, "max_new_tokens": 32},
    {"constraint": Count(3, 2)},
    {"constraint": Count(70, 7), "stop": None, "max_new_tokens": 64},  # no state with over 8 successors
    {"constraint": Count(20, 15), "sampler": Ancestral(), "max_new_tokens": 32},  # 20 such states
    {"constraint": Count(33, 12), "allowed": range(400), "max_new_tokens": 32},  # 33 such states
    {"constraint": Count(1030, 3), "allowed": [range(400)] * 32, "stop": None, "max_new_tokens": 32},
    {"constraint": Count(16, 16), "top_k": 9},
)


def zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **options: make(*args, **options).zero_()


def main() -> None:
    triton.runtime.driver.set_active(absent_gpu())
    denoiser.require_gpu = lambda *args, **options: None
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(owner, name, zeroed(getattr(owner, name)))  # what a kernel would write: a token, or no
    specialised: list[str] = []

    def note_launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        *_, bind = kernel.device_caches[0]
        _, form, options = bind(*args, debug=False, **options)
        specialised.append(f"{kernel.fn.__name__} {form} {options}")
        return SimpleNamespace()

    JITFunction.run = note_launch
    model = accelerate(make_model(torch.device("cpu"), vocab_size=512, canvas_length=32, hidden_size=64).bfloat16())
    model.warm_up(5, 600, progress=False)
    ready = set(specialised)
    for rows in (1, 5):
        for num_tokens in (1, 400):
            prompt = torch.randint(5, 500, (rows, num_tokens))
            real = torch.arange(num_tokens) >= torch.arange(rows)[:, None].clamp(max=num_tokens - 1)
            for setting in SETTINGS:
                options = {"max_new_tokens": 1, "steps": 3, "attention_mask": real, "progress": False} | setting
                specialised.clear()
                dgemma.generate(model, prompt, **options)
                for kernel in sorted(set(specialised) - ready):
                    print(setting, rows, num_tokens, kernel)
        for setting in ({}, {"top_k": 1}, {"top_k": 9, "temperature": 0.7}, {"top_p": 0.9}):
            specialised.clear()
            dgemma.generate_causal(model, prompt, max_new_tokens=2, **setting)
            for kernel in sorted(set(specialised) - ready):
                print("causal", setting, rows, kernel)
    print(f"ready: {len(ready)}")


if __name__ == "__main__":
    main()
