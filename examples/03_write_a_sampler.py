"""Write a sampler in one class, without registering it, and compare it with the library's.

The published sampler accepts only positions whose prediction has a low entropy, even if they are few. After the last
step it commits all other positions too. The sampler below follows the noise schedule. At noise level 0.9 it accepts the
most certain tenth of the positions, and at level 0 it accepts all of them.
"""

import argparse
from dataclasses import dataclass
from typing import ClassVar

import torch

import dgemma


@dataclass(frozen=True, kw_only=True)
class OnTime(dgemma.Sampler):
    """Accept a share 1 - t of the positions, the most certain ones. t is the noise level after the step."""

    valid_for: ClassVar[frozenset[str]] = frozenset({"uniform"})
    redecides: ClassVar[frozenset[str]] = frozenset({"uniform"})  # accepted positions are decided again at every step

    def __call__(self, prediction: dgemma.Prediction, state: dgemma.DenoiseState) -> dgemma.Decision:
        entropy = prediction.entropy.masked_fill(state.frozen, -1.0)  # (B, C); frozen positions come first
        place = entropy.argsort(dim=-1).argsort(dim=-1)  # 0 for the most certain
        quota = (1 - state.next_noise_level) * place.shape[-1]  # (B,)
        accept = (place < quota[:, None]) & state.open
        tokens = prediction.sample(state.uniform("token"))  # one draw per position, from the row's seed
        return dgemma.Decision(tokens=tokens, write=accept, renoise=state.open & ~accept)


def autoregressive_nats(model: dgemma.DiffusionGemma, tokens: torch.Tensor, prompt_len: int) -> float:
    """Score a text (1, N) with the same weights, autoregressively. A low value means fluent or dull text."""
    with torch.no_grad():
        log_probs = model.causal_logits(tokens[:, :-1]).log_softmax(-1)
    return -log_probs.gather(-1, tokens[:, 1:, None])[:, prompt_len - 1 :].mean().item()


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=16, help="steps per canvas (%(default)s)")
steps = parser.parse_args().steps

model = dgemma.DiffusionGemma.from_pretrained("dgemma/text", dtype=torch.float32)
tokenizer = dgemma.Tokenizer.from_pretrained("dgemma/text")
prompt = torch.tensor([tokenizer.encode("Once upon a time there was")])

for sampler in (OnTime(), dgemma.EntropyBound(bound=0.1), dgemma.EntropyBound(bound=2.0), dgemma.Ancestral()):
    out = dgemma.generate(
        *(model, prompt), max_new_tokens=64, steps=steps, sampler=sampler, stop=None, eos_token_ids=(), seed=3
    )
    nats = autoregressive_nats(model, out.tokens, prompt.shape[1])
    print(f"{sampler}\n  {nats:.2f} nats per token, autoregressively: {tokenizer.decode(out.tokens[0])!r}\n")
