"""Train through several denoising steps at once: the gradient of the last step's loss reaches the first step.

What a step thought is handed to the next as a soft embedding (self-conditioning), so a chain of k steps is one
differentiable function, and `dgemma.step` keeps its graph. Here a small model fills 4 × 4 Latin squares of which a few
cells are given. Twice the same budget of forwards: one step at a time, and three steps as a chain whose last answer
counts. Then both solve new squares in three steps.
"""

import argparse
import itertools
from dataclasses import replace

import torch

import dgemma

SIDE, MASK, FIRST_DIGIT = 4, 4, 5
CONFIG = dgemma.presets.tiny().replace(vocab_size=FIRST_DIGIT + SIDE, canvas_length=SIDE * SIDE)


def all_squares() -> torch.Tensor:
    """The 576 Latin squares of side 4, (576, 16), as token ids."""
    rows = list(itertools.permutations(range(SIDE)))
    squares = [
        square
        for square in itertools.product(rows, repeat=SIDE)
        if all(len({row[column] for row in square}) == SIDE for column in range(SIDE))
    ]
    return torch.tensor(squares).flatten(1) + FIRST_DIGIT


def start(
    squares: torch.Tensor, given: torch.Tensor, seed: int, num_steps: int
) -> tuple[dgemma.DenoiseState, dgemma.Knobs]:
    """Canvases (B, 16) whose given cells are frozen and whose others are masked."""
    knobs = dgemma.Knobs(sampler=dgemma.Confidence(), temperature=dgemma.ConstantTemperature(1.0))
    state = dgemma.start_state(
        knobs,
        dgemma.MaskNoise(CONFIG.vocab_size, mask_token_id=MASK),
        seeds=torch.arange(len(squares)) + seed,
        canvas_len=SIDE * SIDE,
        num_steps=num_steps,
        canvas=torch.where(given, squares, MASK),
        frozen=given,
    )
    return state, knobs


def chain(
    model: dgemma.DiffusionGemma, squares: torch.Tensor, given: torch.Tensor, seed: int, num_steps: int
) -> list[dgemma.StepRecord]:
    """`num_steps` steps from noise, their graph kept."""
    cache = model.encode(torch.full((len(squares), 1), CONFIG.bos_token_id))
    state, knobs = start(squares, given, seed, num_steps)
    records = []
    for _ in range(num_steps):
        state, record = dgemma.step(model, state, cache=cache, knobs=knobs)
        records.append(record)
    return records


def train(squares: torch.Tensor, *, num_steps: int, num_updates: int) -> dgemma.DiffusionGemma:
    torch.manual_seed(0)
    model = dgemma.DiffusionGemma(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for update in range(num_updates):
        batch = squares[torch.randint(len(squares), (64,))]
        given = torch.rand(batch.shape) < 0.35
        records = chain(model, batch, given, seed=64 * update, num_steps=num_steps)
        wanted = -records[-1].prediction.log_prob(batch)  # (B, 16)
        loss = wanted[~given].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if update % max(1, num_updates // 4) == 0:
            print(f"  update {update:4d}: loss after {num_steps} step(s) {loss.item():.3f}")
    return model


@torch.no_grad()
def solved(model: dgemma.DiffusionGemma, squares: torch.Tensor, num_steps: int) -> float:
    """The share of squares that come out Latin, the given cells kept."""
    torch.manual_seed(1)
    given = torch.rand(squares.shape) < 0.35
    draft = chain(model, squares, given, seed=10**6, num_steps=num_steps)[-1].state.draft
    grid = draft.unflatten(1, (SIDE, SIDE)).sort(1).values
    columns = (grid == torch.arange(SIDE)[None, :, None] + FIRST_DIGIT).all((1, 2))
    rows = (draft.unflatten(1, (SIDE, SIDE)).sort(2).values == torch.arange(SIDE) + FIRST_DIGIT).all((1, 2))
    return (columns & rows).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forwards", type=int, default=60, help="forwards each model is trained for (%(default)s)")
    arguments = parser.parse_args()
    squares = all_squares()
    torch.manual_seed(0)
    order = torch.randperm(len(squares))
    seen, unseen = squares[order[:450]], squares[order[450:]]

    # The chain is one function: a nudge to what the first step said moves what the last one says.
    model = dgemma.DiffusionGemma(CONFIG)
    cache = model.encode(torch.full((2, 1), CONFIG.bos_token_id))
    state, knobs = start(seen[:2], torch.zeros(2, 16, dtype=torch.bool), seed=0, num_steps=3)
    state, record = dgemma.step(model, state, cache=cache, knobs=knobs)
    said = record.prediction.logits.detach().requires_grad_()  # (2, 16, V)
    state = replace(state, self_cond=said)
    for _ in range(2):
        state, record = dgemma.step(model, state, cache=cache, knobs=knobs)
    (gradient,) = torch.autograd.grad(record.prediction.log_prob(seen[:2]).sum(), said)
    print(f"mean |d (log-probability after step 3) / d (logits of step 1)| = {gradient.abs().mean():.2e}\n")

    for num_steps in (1, 3):
        print(f"trained on chains of {num_steps} step(s), {arguments.forwards} forwards:")
        model = train(seen, num_steps=num_steps, num_updates=arguments.forwards // num_steps)
        print(f"  unseen squares solved in 3 steps: {solved(model, unseen, 3):.1%}\n")


if __name__ == "__main__":
    main()
