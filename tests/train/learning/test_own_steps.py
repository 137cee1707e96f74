import pytest
import torch

import dgemma
from dgemma.run.knobs import Knobs
from dgemma.train import RowMean, TrainBatch
from dgemma.train.learning import OwnSteps
from learning_toy import small_model

NUM_STEPS, CANVAS_LEN = 3, 4
ANSWERS, PROMPTS = [[1, 2, 0, 3], [3, 1, 2, 2]], [[1, 2, 3], [3]]


def loss_of(model, noise, knobs, rows):
    prompt_len = torch.tensor([len(PROMPTS[row]) for row in rows])
    tokens = torch.zeros(len(rows), int(prompt_len.max()) + CANVAS_LEN, dtype=torch.int64)
    for place, row in enumerate(rows):
        text = PROMPTS[row] + ANSWERS[row]
        tokens[place, : len(text)] = torch.tensor(text)
    batch = TrainBatch(tokens=tokens, prompt_len=prompt_len, length=prompt_len + CANVAS_LEN)
    own = OwnSteps(noise=noise, canvas_len=CANVAS_LEN, steps=NUM_STEPS, knobs=knobs)
    return RowMean(own)(model, batch, seeds=torch.tensor(rows) + 7).sums["row"]


@pytest.mark.parametrize("kind", ["mask", "uniform"])
def test_the_loss_is_the_cross_entropy_at_what_generate_leaves_open(kind):
    model = small_model(vocab_size=5, canvas_length=CANVAS_LEN)
    noise = dgemma.MaskNoise(5, mask_token_id=4) if kind == "mask" else dgemma.UniformNoise(5)
    knobs = Knobs(sampler=dgemma.EntropyBound(bound=0.5), temperature=1.0)
    losses = loss_of(model, noise, knobs, [0, 1])
    for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        nats = []
        dgemma.generate(
            model,
            torch.tensor([prompt]),
            max_new_tokens=CANVAS_LEN,
            steps=NUM_STEPS,
            noise=noise,
            sampler=knobs.sampler,
            temperature=1.0,
            stop=None,
            eos_token_ids=[],
            seed=[row + 7],
            progress=False,
            on_step=lambda record: nats.append(  # noqa: B023
                -record.prediction.log_prob(torch.tensor([answer]))[record.before.open].sum()  # noqa: B023
            ),
        )
        want = torch.stack(nats).sum() / (NUM_STEPS * CANVAS_LEN)
        torch.testing.assert_close(losses[row].detach(), want.to(losses), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(losses[row], loss_of(model, noise, knobs, [row])[0], rtol=1e-6, atol=1e-7)


def test_the_gradient_reaches_the_first_step_through_self_conditioning():
    model = small_model(vocab_size=5, canvas_length=CANVAS_LEN)
    knobs = Knobs(sampler=dgemma.EntropyBound(bound=0.0, greedy=True), temperature=1.0)
    loss_of(model, dgemma.UniformNoise(5), knobs, [0]).sum().backward()
    weight = model.get_parameter("self_conditioning.down_proj.weight")
    assert weight.grad is not None
    assert weight.grad.abs().max() > 0


def test_knobs_that_may_exclude_the_answer_are_refused():
    """The cross-entropy of an answer outside top-k or top-p is infinite."""
    for cut in ({"top_k": 3}, {"top_p": 0.9}):
        knobs = Knobs(sampler=dgemma.EntropyBound(), temperature=1.0, **cut)
        with pytest.raises(ValueError, match=r"OwnSteps\.knobs must have neither top_k nor top_p, got Knobs.*infinite"):
            OwnSteps(noise=dgemma.UniformNoise(5), canvas_len=CANVAS_LEN, steps=NUM_STEPS, knobs=knobs)
