"""`generate` with the published defaults equals `generate` of transformers, token by token, on the same noise."""

import torch

import dgemma
from dgemma.diffusion import draws
from published import pair


class SharedNoise:
    """Stand-in for torch.randint and torch.multinomial that returns our counter-based draws to transformers."""

    def __init__(self, seeds: list[int], canvas_len: int) -> None:
        self.seeds, self.canvas_len = torch.tensor(seeds), canvas_len
        self.block, self.step = -1, 0
        self.canvases_asked = 0

    def uniform(self, purpose: str) -> torch.Tensor:
        clock = torch.full_like(self.seeds, 1)
        return draws.uniform(self.seeds, clock * self.block, clock * self.step, self.canvas_len, purpose)

    def randint(self, low: int, high: int, size: tuple[int, int], device: object = None) -> torch.Tensor:
        if self.canvases_asked == 0:  # a new block's first canvas
            self.block, self.step, purpose = self.block + 1, 0, "prior"
        else:
            purpose = "noise"
        self.canvases_asked += 1
        canvas = torch.floor(self.uniform(purpose) * high).long()
        if purpose == "noise":
            self.step += 1
        return canvas

    def multinomial(self, probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        cumulative = probabilities.double().cumsum(-1)
        u = self.uniform("token").flatten()[:, None] * cumulative[:, -1:]
        return torch.searchsorted(cumulative, u, right=True)

    def next_block(self) -> None:
        self.canvases_asked = 0


def published_generate(monkeypatch, model, prompt, mask, seeds, **options):
    noise = SharedNoise(seeds, model.config.canvas_length)
    finalize = type(model)._finalize_canvas

    def finalize_canvas(*args, **kwargs):
        noise.next_block()
        return finalize(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "randint", noise.randint)
        patch.setattr(torch, "multinomial", noise.multinomial)
        patch.setattr(model, "_finalize_canvas", finalize_canvas)
        return model.generate(prompt, attention_mask=mask, pad_token_id=0, **options)


def compare(found, expected, prompt_len: int) -> None:
    assert torch.equal(found.new_tokens, expected.sequences[:, prompt_len:])
    torch.testing.assert_close(found.tokens_per_forward, expected.tokens_per_forward)


def test_generate_equals_the_published_one_token_by_token_up_to_the_step_cap(monkeypatch):
    ours, theirs = pair(seed=3)
    prompt, mask = torch.randint(5, 512, (3, 11)), torch.ones(3, 11, dtype=torch.long)
    mask[1, :6] = 0  # row 0 has no padding
    mask[2, :2] = 0
    options = {"max_new_tokens": 64, "max_denoising_steps": 6}
    expected = published_generate(monkeypatch, theirs, prompt, mask, [5, 6, 7], eos_token_id=[1], **options)
    found = dgemma.generate(ours, prompt, attention_mask=mask, max_new_tokens=64, steps=6, seed=5, eos_token_ids=[1])
    compare(found, expected, 11)
    assert (found.steps == 6).all()


def test_rows_that_stop_early_equal_the_published_ones_token_by_token(monkeypatch):
    # With sharper logits and a low temperature the argmax repeats and entropy falls, at a different step in each row.
    ours, theirs = pair(seed=2)
    with torch.no_grad():
        ours.norm.weight.mul_(6)
        theirs.model.decoder.norm.weight.mul_(6)
    prompt = torch.randint(5, 512, (3, 11), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(prompt)
    mask[1, :6] = 0
    options = {"max_denoising_steps": 24, "confidence_threshold": 0.5, "t_max": 0.1, "t_min": 0.025}
    expected = published_generate(
        monkeypatch, theirs, prompt, mask, [5, 6, 7], eos_token_id=[1], max_new_tokens=64, **options
    )
    found = dgemma.generate(
        ours,
        prompt,
        attention_mask=mask,
        max_new_tokens=64,
        steps=24,
        temperature=dgemma.LinearTemperature(start=0.1, end=0.025),
        stop=dgemma.StableAndConfident(stability=1, confidence=0.5),
        seed=5,
        eos_token_ids=[1],
    )
    compare(found, expected, 11)
    assert found.steps[:, 0].max() < 24, "this case must stop early"
    assert len(set(found.steps[:, 0].tolist())) > 1, "this case must stop at a different step in each row"


def test_stop_tokens_inside_a_canvas_end_rows_as_published(monkeypatch):
    ours, theirs = pair(seed=4)
    prompt, mask = torch.randint(5, 512, (3, 4)), torch.ones(3, 4, dtype=torch.long)
    # With so many stop tokens some rows end in the first canvas and others later.
    eos = list(range(1, 12))
    options = {"max_new_tokens": 128, "max_denoising_steps": 6}
    expected = published_generate(monkeypatch, theirs, prompt, mask, [0, 1, 2], eos_token_id=eos, **options)
    found = dgemma.generate(ours, prompt, attention_mask=mask, max_new_tokens=128, steps=6, seed=0, eos_token_ids=eos)
    compare(found, expected, 4)
    ended = (found.steps == 0).any(1)
    assert ended.any(), "in this case one row must end before another"


def test_max_new_tokens_rounds_up_to_whole_canvases_as_published(monkeypatch):
    ours, theirs = pair(seed=5)
    prompt = torch.randint(5, 512, (1, 4))
    expected = published_generate(
        monkeypatch,
        theirs,
        prompt,
        torch.ones_like(prompt),
        [9],
        eos_token_id=[1],
        max_new_tokens=33,
        max_denoising_steps=3,
    )
    found = dgemma.generate(ours, prompt, max_new_tokens=33, steps=3, seed=9, eos_token_ids=[1])
    assert found.new_tokens.shape == (1, 64)
    compare(found, expected, 4)
