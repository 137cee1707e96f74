"""Every kind of run reads the images of its prompt."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import dgemma
from dgemma import ByteTokenizer, Choice, DiffusionGemma, Guided, MaskNoise, Slot, Trajectory, presets
from dgemma.checkpoint.images import encode_text, processor_of
from dgemma.many.prompts import PromptFile
from dgemma.run.records import BlockCommit
from image_prompts import prompts, random_images, seeing_model

ROWS = [[5, (6, 9), 4], [3], [2, (3, 3), 1, (6, 6), 8]]
OPTIONS = {"max_new_tokens": 64, "steps": 3, "eos_token_ids": [], "stop": None}


@pytest.fixture(scope="module")
def model():
    return seeing_model()


def one_by_one(model, tokens, mask, images, **options):
    """Generate for each row of a batch alone, without padding."""
    found, images = [], list(images)
    for row, (text, real) in enumerate(zip(tokens, mask, strict=True)):
        out = dgemma.generate(model, text[real.bool()][None], images=images[row], seed=row, **options)
        found.append(out.new_tokens[0])
    return torch.stack(found)


def by_row(images):
    return [images.select([0]), None, images.select([1, 2])]


def test_a_batch_with_different_numbers_of_images_equals_its_rows_alone(model):
    tokens, mask, images = prompts(ROWS)
    out = dgemma.generate(model, tokens, attention_mask=mask, images=images, **OPTIONS)
    assert torch.equal(out.new_tokens, one_by_one(model, tokens, mask, by_row(images), **OPTIONS))
    other = random_images(images.grids, seed=3)
    wrong = dgemma.generate(model, tokens, attention_mask=mask, images=other, **OPTIONS)
    assert [torch.equal(*rows) for rows in zip(out.new_tokens, wrong.new_tokens, strict=True)] == [False, True, False]


def test_a_recorded_run_keeps_its_images(model, tmp_path):
    tokens, mask, images = prompts(ROWS)
    out = dgemma.generate(model, tokens, attention_mask=mask, images=by_row(images), record=True, **OPTIONS)
    out.trajectory.save(tmp_path / "run.safetensors")
    replayed = Trajectory.load(tmp_path / "run.safetensors").replay(model)
    assert torch.equal(replayed.new_tokens, out.new_tokens)


def test_streams_constraints_and_autoregressive_runs_read_images(model):
    tokens, mask, images = prompts(ROWS)
    inputs = {"attention_mask": mask, "images": images}
    out = dgemma.generate(model, tokens, **inputs, **OPTIONS)
    events = dgemma.stream(model, tokens, **inputs, **OPTIONS)
    assert torch.equal(
        torch.cat([event.tokens for event in events if isinstance(event, BlockCommit)], 1), out.new_tokens
    )
    tokenizer = ByteTokenizer()
    chosen = dgemma.generate(
        model,
        tokens,
        **inputs,
        max_new_tokens=32,
        steps=3,
        constraint=Choice(["cat", "horse"], tokenizer),
        eos_token_ids=[1],
    )
    assert {tokenizer.decode(row) for row in chosen.new_tokens} <= {"cat", "horse"}
    greedy = dgemma.generate_causal(model, tokens, **inputs, max_new_tokens=5, top_k=1, eos_token_ids=[])
    text, read = tokens[2:], images.select([1, 2])  # the longest row has no padding
    with torch.no_grad():
        for _ in range(5):
            text = torch.cat((text, model.causal_logits(text, images=read)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(greedy[2:], text[:, -5:])


def test_guidance_without_strength_is_the_model_and_its_second_prefix_has_no_image(model):
    tokens, _, images = prompts(ROWS[:1])
    plain = dgemma.generate(model, tokens, images=images, **OPTIONS)
    guided = Guided(model, strength=0.0, unconditional=4)
    assert torch.equal(dgemma.generate(guided, tokens, images=images, **OPTIONS).new_tokens, plain.new_tokens)
    blind = Guided(model, strength=-1.0, unconditional=4)
    runs = [dgemma.generate(blind, tokens, images=random_images(images.grids, seed=s), **OPTIONS) for s in (0, 1)]
    assert torch.equal(runs[0].new_tokens, runs[1].new_tokens)


@pytest.mark.parametrize("record", [False, True])
def test_infilling_never_covers_an_image_with_a_canvas(model, record):
    """The text after the image is shorter than a canvas of 32, which would start inside the image."""
    tokens, _, images = prompts([[1, (9, 9), 6]])
    holes, length = [(tokens.shape[1] - 4, tokens.shape[1] - 1)], tokens.shape[1]
    settings = {"noise": MaskNoise(512, mask_token_id=4), "sampler": dgemma.Confidence(), "steps": 3, "record": record}
    out = dgemma.infill(model, tokens, holes, images=images, **settings)
    start = length - 6 - 1  # the end marker of the image and the text after it
    canvas = torch.nn.functional.pad(tokens[:, start:].clone(), (0, 32 - 7), value=4)
    canvas[:, 3:6] = 4
    with torch.no_grad():
        logits = model.denoise(canvas, model.encode(tokens[:, :start], images=images)).logits[0, 3:6]
    logits[:, 4] = -torch.inf  # the mask is never proposed
    expected = logits.log_softmax(-1).gather(-1, out.tokens[0, -4:-1, None])[:, 0]
    torch.testing.assert_close(out.log_probs[0, -4:-1], expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="infill images must stand before the first hole"):
        dgemma.infill(model, tokens, [(1, 2)], images=images, **settings)


def test_decisions_read_the_images_before_their_first_slot(model):
    images = random_images([(6, 6), (3, 9)])
    settings = {"tokenizer": ByteTokenizer(), "num_draws": 1}
    template = [images.select([0]), "Is it a cat? ", Slot(["yes", "no"]), " Sure? ", Slot(["yes", "no"])]
    other = [images.select([1]), *template[1:]]
    alone = [dgemma.slots(model, each, **settings, seed=seed) for seed, each in enumerate((template, other))]
    both = list(dgemma.decide_many(model, [template, other], **settings))
    for first, second in zip(alone, both, strict=True):
        for a, b in zip(first.answers, second.answers, strict=True):
            torch.testing.assert_close(a.probabilities, b.probabilities, rtol=1e-4, atol=1e-5)
    assert alone[0].tokens[0] == 2  # bos, although the template begins with an image
    assert (alone[0].answers[0].probabilities - alone[1].answers[0].probabilities).abs().max() > 1e-3
    with pytest.raises(ValueError, match="images must stand before the first slot"):
        dgemma.slots(model, ["It is ", Slot(["a", "b"]), images], **settings)


def pictures(folder):
    names = []
    for number, size in enumerate([(20, 30), (9, 40)]):
        pixels = np.random.default_rng(number).integers(256, size=(*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        names.append(str(folder / f"{number}.png"))
    return names


def test_prompt_files_name_images_and_a_changed_picture_is_another_prompt(model, tmp_path, monkeypatch):
    tokenizer, (first, second) = ByteTokenizer(), pictures(tmp_path)
    lines = [
        {"prompt": "What is this?", "images": [first]},
        {"prompt": "Compare <|image|> to <|image|>!", "images": [first, second]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": second}, {"type": "text", "text": "?"}]}
            ]
        },
        "no image",
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"max_new_tokens": 32, "steps": 2, "eos_token_ids": []}
    run = {"tokenizer": tokenizer, "out": tmp_path / "out.jsonl", "batch_size": 3, **settings}
    found = list(dgemma.generate_many(model, PromptFile(tmp_path / "prompts.jsonl"), **run))
    process = processor_of(model)
    for result, sources in zip(found, ([first], [first, second], [second], []), strict=True):
        images = process(sources) if sources else None
        line = lines[result.index]
        if result.index == 2:
            parts = [{"type": "image"}, {"type": "text", "text": "?"}]
            ids = tokenizer.chat([{"role": "user", "content": parts}], images=images)
        else:
            ids = encode_text(tokenizer, line if isinstance(line, str) else line["prompt"], images)
        expected = dgemma.generate(model, torch.tensor([ids]), images=images, seed=result.index, **settings)
        assert torch.equal(result.new_tokens, expected.new_tokens[0])
    monkeypatch.setattr(model, "image_tokens", 70, raising=False)
    with pytest.raises(ValueError, match="image_tokens"):
        next(dgemma.generate_many(model, PromptFile(tmp_path / "prompts.jsonl"), **run))
    monkeypatch.undo()
    assert len(list(dgemma.generate_many(model, PromptFile(tmp_path / "prompts.jsonl"), **run))) == 4
    Image.new("RGB", (20, 30)).save(second)
    with pytest.raises(ValueError, match="prompt 1 differs"):
        list(dgemma.generate_many(model, PromptFile(tmp_path / "prompts.jsonl"), **run))


def test_images_that_do_not_fit_the_prompt_are_named(model):
    tokens, _, images = prompts(ROWS[:1])
    absent, wide = "images must be given for a prompt with image tokens", random_images([(840, 3)])
    for value, sentence in (
        (None, absent),
        ([None], absent),
        (random_images([(6, 9)] * 2), "be as many as the runs of image tokens in the prompt, 1, got 2"),
        (random_images([(3, 3)]), r"have the sizes of the prompt's runs of image tokens, \(6,\), got \(1,\)"),
        (wide, "have at most 256 patches per side, got 840"),
        ([wide], "have at most 256 patches per side, got 840"),
        ([images, None], "have one entry per row, 1, got 2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            dgemma.generate(model, tokens, images=value)
    text = DiffusionGemma(presets.tiny())
    with pytest.raises(ValueError, match="images must be None for a DiffusionGemma without a vision tower"):
        dgemma.generate(text, tokens, images=images)
    with pytest.raises(ValueError, match="without a vision tower"):
        text.encode(tokens, images=images)
    with pytest.raises(ValueError, match="without a vision tower"):
        next(dgemma.generate_many(text, [{"tokens": [5], "images": ["a.png"]}]))
