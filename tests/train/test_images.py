"""Training with images: the loss is that of `encode` with images, and its gradient that of finite differences."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from dgemma import ByteTokenizer, DiffusionGemma, ImageProcessor, UniformNoise, presets
from dgemma.data.text import PromptSource, TokenFile, read_documents, scan
from dgemma.train import LoRA, TrainBatch, add_lora, evaluate
from dgemma.train.objective import Objective
from dgemma_kernels import accelerate_training
from image_prompts import IMAGE, prompts, random_images

# Embeddings are about as large as the outputs of layers, so that finite differences are small against the weights.
CONFIG = presets.tiny(vision=True).replace(canvas_length=6, sliding_window=9, initializer_range=0.125)
ROWS = [[2, (6, 6), 1, (3, 9), 4], [9], [(9, 9), 3]]  # the last image is as long as the window
PROCESSOR = ImageProcessor(max_soft_tokens=70, patch_size=4)
SEEDS = torch.tensor([3, 4, 5])


@pytest.fixture
def model():
    torch.manual_seed(1)
    return DiffusionGemma(CONFIG, dtype=torch.float64)


def make_batch():
    """Prompts with two, no and one image, and answers of 8 tokens: two canvases, of which the last is mostly fill."""
    tokens, mask, images = prompts(ROWS)
    rows = [torch.cat((text[real.bool()], torch.arange(200, 208))) for text, real in zip(tokens, mask, strict=True)]
    length = torch.tensor([len(row) for row in rows])
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    by_row = (images.select([0, 1]), None, images.select([2]))
    return TrainBatch(tokens=tokens, prompt_len=length - 8, length=length, frozen=tokens == IMAGE, images=by_row)


def make(**fields):
    common = {"noise": UniformNoise(CONFIG.vocab_size), "canvas_len": CONFIG.canvas_length, "self_cond_prob": 0.0}
    return Objective(**{**common, "canvases": "all", **fields})


def test_the_loss_is_that_of_encode_and_denoise_with_images(model):
    batch, objective = make_batch(), make()
    with torch.no_grad():
        terms = objective(model, batch, seeds=SEEDS)
        canvases, noisy = objective.draw(batch, SEEDS)
        for row, images in enumerate(batch.images):
            losses = 0.0
            for number, start in enumerate(canvases.starts[row].tolist()):
                cache = model.encode(canvases.tokens[row : row + 1, :start], images=images)
                logits = model.denoise(noisy.z[row : row + 1, number], cache).logits[0]
                losses += F.cross_entropy(logits, canvases.x[row, number], reduction="sum")
            torch.testing.assert_close(terms.sums["decoder"][row], losses)
            text = canvases.tokens[row : row + 1, : canvases.starts[row, -1] + CONFIG.canvas_length]
            costs = F.cross_entropy(model.causal_logits(text, images=images)[0, :-1], text[0, 1:], reduction="none")
            torch.testing.assert_close(terms.sums["causal"][row], costs[text[0, 1:] != IMAGE].sum())


@pytest.mark.slow
def test_gradients_of_the_tower_equal_finite_differences(model):
    batch, objective = make_batch(), make()
    loss = lambda: objective.reduce(objective(model, batch, seeds=SEEDS))  # noqa: E731
    weights = list(model.vision.parameters())
    gradients = torch.autograd.grad(loss(), weights)
    generator = torch.Generator().manual_seed(0)
    for weight, gradient in zip(weights, gradients, strict=True):
        direction, values = torch.randn(weight.shape, generator=generator, dtype=torch.float64), []
        for sign in (1, -1):
            with torch.no_grad():
                weight.add_(sign * 1e-8 * direction)
                values.append(loss())
                weight.sub_(sign * 1e-8 * direction)
        slope = (values[0] - values[1]) / 2e-8
        torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-4, atol=1e-5)


def test_rows_and_micro_batches_keep_their_images(model):
    batch, objective = make_batch(), make()
    picked = torch.tensor([2, 0])
    whole, part = objective(model, batch, seeds=SEEDS), objective(model, batch.select(picked), seeds=SEEDS[picked])
    torch.testing.assert_close(part.sums["decoder"], whole.sums["decoder"][picked])
    other = replace(batch, images=(random_images(batch.images[0].grids, seed=9), *batch.images[1:]))
    changed = (objective(model, other, seeds=SEEDS).sums["decoder"] - whole.sums["decoder"]).abs() > 1e-6
    assert changed.tolist() == [True, False, False]


def test_the_joint_pass_of_adapters_reads_images_too(model):
    """Gradients of the door's pass, in Triton's interpreter, equal those of the plain pass."""
    weights = add_lora(model, LoRA(targets=("attention", "vision_projection")))
    with torch.no_grad():
        for weight in weights:
            weight.normal_(std=0.1, generator=torch.Generator().manual_seed(len(weight)))
    model.recompute_activations = True
    batch, objective = make_batch(), make(self_cond_prob=0.5)
    gradients = lambda: torch.autograd.grad(objective.reduce(objective(model, batch, seeds=SEEDS)), weights)  # noqa: E731
    plain = gradients()
    with accelerate_training(model):
        fast = gradients()
    torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-9)


@pytest.fixture
def drawings(tmp_path):
    """Two prompts with pictures, one of them a chat in which the second turn has another picture."""
    for number, colour in enumerate(("red", "green", "blue")):
        Image.new("RGB", (40 + 20 * number, 40), colour).save(tmp_path / f"{colour}.png")
    part = lambda colour: {"type": "image", "image": str(tmp_path / f"{colour}.png")}  # noqa: E731
    chat = [
        {"role": "user", "content": [part("green"), {"type": "text", "text": "Colour?"}]},
        {"role": "assistant", "content": "green"},
        {"role": "user", "content": [{"type": "text", "text": "And this?"}, part("blue")]},
        {"role": "assistant", "content": "blue"},
    ]
    lines = [{"prompt": "Colour?", "answer": "red", "images": [str(tmp_path / "red.png")]}, {"messages": chat}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def test_files_with_pictures_become_batches_with_images(drawings):
    model, tokenizer = DiffusionGemma(CONFIG), ByteTokenizer()
    documents = list(read_documents(drawings / "data.jsonl"))
    file = TokenFile.write(documents, tokenizer, drawings / "tokens", images=PROCESSOR)
    assert TokenFile.open(drawings / "tokens").fingerprint == file.fingerprint
    source = PromptSource(file=file, max_len=200, batch_size=3)
    batch = source(0, range(3))
    colours = {(255, 0, 0): "red", (0, 128, 0): "green", (0, 0, 255): "blue"}
    for row, (prompt_len, length) in enumerate(batch.spans):
        answer = tokenizer.decode(batch.tokens[row, prompt_len:length])
        images = batch.images[row]
        first, last = images.select([0]), images.select([len(images) - 1])
        assert colours[tuple(last.patches[0, :3].tolist())] == answer.strip()
        assert (len(images), colours[tuple(first.patches[0, :3].tolist())]) == (
            (2, "green") if answer.startswith("blue") else (1, answer)
        )
        assert int((batch.tokens[row] == IMAGE).sum()) == sum(images.num_tokens)
    assert torch.equal(batch.frozen, batch.tokens == IMAGE)
    bound = evaluate(model, source, UniformNoise(CONFIG.vocab_size), num_rows=3, num_samples=1, progress=False)
    assert bound.num_tokens == len("redgreenblue") + 5  # one end of a text each, and of two turns
    with pytest.raises(ValueError, match="scan file must have no images"):
        scan(file, row_len=6, context=6)
    with pytest.raises(ValueError, match="must be a processor for documents with pictures"):
        TokenFile.write(documents, tokenizer, drawings / "none")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a", "answer": "b", "images": "x.png"}, r'1 "images" must be a list of files'),
        ({"text": "a", "images": ["x.png"]}, r'1 "images" must be a list of files, with a "prompt"'),
        ({"prompt": "<|image|><|image|>", "answer": "b", "images": ["red.png"]}, "must be as many as"),
        ({"prompt": "a", "answer": "b", "images": ["none.png"]}, "none.png does not exist"),
    ],
    ids=["no-list", "no-prompt", "other-count", "missing"],
)
def test_a_line_with_bad_pictures_is_refused(drawings, monkeypatch, line, message):
    monkeypatch.chdir(drawings)
    (drawings / "bad.jsonl").write_text(json.dumps(line))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        TokenFile.write(read_documents("bad.jsonl"), ByteTokenizer(), "bad", images=PROCESSOR)
