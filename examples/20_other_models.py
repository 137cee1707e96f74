"""Generate with another model: a small BERT of transformers, trained here for seconds, then wrapped as a denoiser.

The texts repeat three random letters, so the first three letters determine the others.
A published checkpoint is wrapped in the same way:

    model = AutoModel.from_pretrained("GSAI-ML/LLaDA-8B-Instruct", trust_remote_code=True, dtype=torch.bfloat16)
    denoiser = dgemma.wrap(model, canvas_len=128, mask_token_id=126336)
    model = AutoModel.from_pretrained("Dream-org/Dream-v0-Instruct-7B", trust_remote_code=True, dtype=torch.bfloat16)
    denoiser = dgemma.wrap(model, canvas_len=128, attention_mask="pairs", shift=True)
"""

import argparse
import math

import torch
from transformers import BertConfig, BertForMaskedLM

import dgemma
from dgemma.train.likelihood import evaluate

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=300, help="training steps (%(default)s)")
args = parser.parse_args()
if args.steps < 1:
    parser.error(f"--steps must be at least 1, got {args.steps}")

FIRST, MASK, VOCAB = 2, 1, 28  # ids 2 to 27 are the letters, 1 is the mask, 0 pads


def make_texts(rows: int) -> torch.Tensor:
    """Return texts (rows, 12) that repeat three random letters."""
    return FIRST + torch.randint(26, (rows, 3)).repeat(1, 4)


def show(tokens: torch.Tensor) -> str:
    return "".join(chr(ord("a") + token - FIRST) if token >= FIRST else "_" for token in tokens.tolist())


torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
model = BertForMaskedLM(BertConfig(vocab_size=VOCAB, max_position_embeddings=32, **sizes, **no_dropout))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(args.steps):
    text = make_texts(64)
    masked = torch.rand(text.shape) < torch.rand(64, 1)  # every share of masks, as in masked diffusion
    logits = model(input_ids=torch.where(masked, MASK, text)).logits
    loss = torch.nn.functional.cross_entropy(logits[masked], text[masked])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss after {args.steps} steps: {loss.item():.3f}")

denoiser = dgemma.wrap(model, canvas_len=9, mask_token_id=MASK)
prompts = make_texts(3)[:, :3]
for steps in (9, 1):
    out = dgemma.generate(denoiser, prompts, steps=steps, progress=False)
    print(f"{steps} steps: " + "  ".join(show(row) for row in out.tokens))
text = make_texts(1)
is_hole = torch.zeros_like(text, dtype=torch.bool)
is_hole[:, 3:5] = is_hole[:, 8:11] = True
filled = dgemma.infill(denoiser, text, is_hole, progress=False)
print(f"infilled {show(torch.where(is_hole, MASK, text)[0])} → {show(filled.tokens[0])}")
found = evaluate(denoiser, make_texts(64)[:, :10], dgemma.MaskNoise(VOCAB, mask_token_id=MASK), progress=False)
exact = 2 * math.log(26)  # the first letter is the prompt, and two more are random
bound = 9 * found.nelbo.value  # nats per text
print(f"negative log-likelihood after the first letter, nats per text: bound {bound:.2f}, exact {exact:.2f}")
