"""With `batch_invariant=True`, a row has the same bits in any batch, at any place, and however its prompt is read."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dgemma
from dgemma.sampling import SoftThreshold
from dgemma_kernels import FusedDenoiser, accelerate
from dgemma_kernels.engine import forward, reading
from dgemma_kernels.engine.cache import Arena
from dgemma_kernels.engine.products import ROWS, in_slices
from dgemma_kernels.formats.float8 import multiply, multiply_unscaled, quantize
from dgemma_kernels.ops import configs
from dgemma_kernels.ops.vocabulary import kernel as vocabulary
from kernel_inputs import draw_tokens, make_model

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: the interpreter would take hours")


class Texts:
    """Random prompts and canvases, and the bits that each has alone."""

    def __init__(self, model: FusedDenoiser, lengths: list[int]) -> None:
        self.model, self.random = model, random.Random(0)
        generator = torch.Generator().manual_seed(0)

        def draw(count: int) -> Tensor:
            return torch.randint(model.config.vocab_size, (count,), generator=generator)

        self.prompts = [draw(length) for length in lengths]
        self.canvases = [draw(model.config.canvas_length) for _ in lengths]
        self.alone = [self.compute([row], [[length]]) for row, length in enumerate(lengths)]

    def compute(self, rows: list[int], pieces: list[list[int]]) -> list[Tensor]:
        """Read the prompts of these rows in pieces, and return their logits, (B, ...) each.

        pieces[b]: sizes that add up to the length of row b's prompt. Call i reads piece i of every row.
        """
        cache: Any = None
        starts = [0] * len(rows)
        for sizes in zip(*pieces, strict=True):
            width = max(sizes)
            tokens, real = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width)
            for at, (row, size) in enumerate(zip(rows, sizes, strict=True)):
                tokens[at, width - size :] = self.prompts[row][starts[at] : starts[at] + size]
                real[at, width - size :] = 1
                starts[at] += size
            mask = None if real.all() else real.to(DEVICE)
            cache = self.model.encode(tokens.to(DEVICE), cache, mask)
        canvas = torch.stack([self.canvases[row] for row in rows]).to(DEVICE)
        first = self.model.denoise(canvas, cache)
        word = self.model.causal_logits(canvas[:, :1].contiguous(), cache)
        second = self.model.denoise(canvas, cache, self_cond=first.shaped(temperature=0.6))
        words = self.model.causal_logits(canvas[:, 1:4].contiguous(), cache)
        return [first.logits, word, second.logits, words]

    def draw_batch(self, most_rows: int, most_pieces: int) -> tuple[list[int], list[list[int]]]:
        rows = self.random.sample(range(len(self.prompts)), self.random.randint(1, min(most_rows, len(self.prompts))))
        lengths = [len(self.prompts[row]) for row in rows]
        count = self.random.randint(1, min(most_pieces, *lengths))
        cuts = [sorted(self.random.sample(range(1, length), count - 1)) for length in lengths]
        ends = [[*cut, length] for cut, length in zip(cuts, lengths, strict=True)]
        return rows, [[b - a for a, b in zip([0, *end], end, strict=False)] for end in ends]

    def check(self, rows: list[int], pieces: list[list[int]]) -> None:
        together = self.compute(rows, pieces)
        for at, row in enumerate(rows):
            same = [torch.equal(got[at], want[0]) for got, want in zip(together, self.alone[row], strict=True)]
            assert all(same), f"row {row} at place {at} of {rows}, read in {pieces}: {same}"


@pytest.fixture(autouse=True)
def _default_tiles():
    """Use this GPU's own tiles, which differ by the number of tokens, and not the default ones of other tests."""


@pytest.fixture
def _small_pieces(monkeypatch):
    """Use small chunks of the vocabulary and small parts of attention, so that short texts take several of each."""
    tile = 64 if ON_GPU else 16
    monkeypatch.setattr(vocabulary, "CHUNK", 16)
    monkeypatch.setattr(forward, "_TILE", tile)
    monkeypatch.setattr(forward, "_FULL_PART", tile)


@pytest.mark.slow
@pytest.mark.usefixtures("_small_pieces")
def test_a_row_has_the_same_bits_alone_and_in_a_batch_however_its_prompt_is_read(monkeypatch):
    texts = Texts(accelerate(make_model(DEVICE, sliding_window=8), batch_invariant=True), [19, 2])
    monkeypatch.setattr(Arena, "prefill_len", lambda arena, batch_size: 10)
    monkeypatch.setattr(reading, "_SIZES", (10,))  # the last chunk has one token
    texts.check([1, 0], [[1, 1], [11, 8]])


@pytest.mark.slow
@pytest.mark.usefixtures("_small_pieces")
def test_prompts_with_a_shared_prefix_have_the_bits_of_prompts_read_as_a_whole():
    fast = accelerate(make_model(DEVICE, sliding_window=8), batch_invariant=True)
    prefix, prefixes = draw_tokens(9), dgemma.SharedPrefixes()
    prompts = [torch.cat((prefix, draw_tokens(2, seed=1))), draw_tokens(3, seed=2), torch.cat((prefix, prefix))]
    canvas = draw_tokens(3, fast.config.canvas_length, seed=3)
    logits = fast.denoise(canvas, prefixes.encode(fast, prompts, [None] * 3)).logits
    assert prefixes.num_reused == len(prefix)
    for row, prompt in enumerate(prompts):
        assert torch.equal(logits[row], fast.denoise(canvas[row : row + 1], fast.encode(prompt[None])).logits[0])


def test_a_prefix_of_other_weights_is_read_again():
    model = make_model(DEVICE)
    fast, prefixes, prompt = accelerate(model), dgemma.SharedPrefixes(), draw_tokens(9)
    prefixes.encode(fast, [prompt, prompt], [None, None])
    with torch.no_grad():
        model.layers[0].mlp.up_proj.weight.mul_(2)
    prefixes.encode(fast, [prompt, prompt], [None, None])
    assert prefixes.num_read == 2 * len(prompt)


def test_a_run_scored_again_has_the_bits_of_its_steps_also_after_rows_have_ended():
    model, of_steps, num_rows = accelerate(make_model(DEVICE), batch_invariant=True), [], []

    def add(record):
        of_steps.append(torch.zeros(4, dtype=torch.float64, device=DEVICE).index_add(0, record.rows, record.log_prob))
        num_rows.append(len(record.rows))

    options = {"max_new_tokens": 8, "steps": 6, "temperature": 1.0, "stop": None, "eos_token_ids": []}
    options |= {"sampler": SoftThreshold(tau=0.05, softness=0.05), "noise": dgemma.UniformNoise(40)}
    out = dgemma.generate(model, draw_tokens(4, 3), on_step=add, record=True, progress=False, **options)
    assert set(num_rows) == {2, 4}  # two rows of each canvas end before the others
    assert torch.equal(out.trajectory.step_log_probs(model), torch.stack(of_steps))


@pytest.fixture(scope="module")
def two_layers() -> dgemma.DiffusionGemma:
    """Two layers of the published size. Attention has scale 1, so norm weights of 1 would make each softmax one-hot."""
    kinds = ("sliding_attention", "full_attention")
    config = dgemma.presets.diffusiongemma_26b_a4b().replace(num_hidden_layers=2, layer_types=kinds)
    torch.manual_seed(0)
    model = dgemma.DiffusionGemma(config, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.fill_(0.25)
    return model


@needs_gpu
@pytest.mark.parametrize(
    ("weights", "precision"),
    [("bf16", "exact"), ("packed", "exact"), ("fp8", "fast"), ("int4", ("dense",)), ("nvfp4", "exact")],
)
def test_two_layers_of_the_published_size_have_the_same_bits_in_any_batch(two_layers, weights, precision):
    fast = accelerate(two_layers, weights, precision=precision, batch_invariant=True)
    texts = Texts(fast, [1, 63, 64, 300, 641, 900, 1100, 1400])
    for _ in range(40):
        texts.check(*texts.draw_batch(7, 3))


@needs_gpu
def test_texts_are_the_same_alone_in_a_batch_and_in_changing_batches():
    model = dgemma.DiffusionGemma.from_pretrained("dgemma/text", device=DEVICE, dtype=torch.bfloat16)
    storyteller = accelerate(model, batch_invariant=True)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 8000, (length,), generator=generator) for length in (3, 20, 64, 130, 200, 300, 400)]
    options: Any = {"max_new_tokens": 128, "progress": False}
    alone = [
        dgemma.generate(storyteller, prompt[None].to(DEVICE), seed=seed, **options).new_tokens[0].cpu()
        for seed, prompt in enumerate(prompts)
    ]
    width = max(map(len, prompts))
    padded = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
    real = torch.stack([torch.arange(width) >= width - len(prompt) for prompt in prompts])
    together = dgemma.generate(storyteller, padded.to(DEVICE), attention_mask=real.to(DEVICE), seed=0, **options)
    many = list(dgemma.generate_many(storyteller, prompts, batch_size=3, seed=0, **options))
    for want, row, completion in zip(alone, together.new_tokens.cpu(), many, strict=True):
        assert torch.equal(row[: len(want)], want)  # alone, a row may end before the last canvas of the batch
        assert torch.equal(completion.new_tokens[: len(want)], want)


@pytest.mark.parametrize("product", ["plain", "fp8", "fp8 without scales", "fp8 in float32"])
def test_a_product_in_slices_has_the_same_bits_for_a_row_at_any_place(product):
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    x, weight = (torch.randn(rows, 64, generator=generator).to(DEVICE, dtype) for rows in (ROWS + 21, 48))

    def multiply_rows(rows: Tensor, *, whole: bool = False) -> Tensor:
        wrap = (lambda fn: fn) if whole else in_slices
        if product == "plain":
            return wrap(multiply)(rows, weight)
        if product == "fp8":
            return wrap(multiply)(quantize(rows), quantize(weight))
        out = None
        if product == "fp8 in float32":  # sums that half precision cannot represent
            rows, out = rows.half(), torch.empty(len(rows), len(weight), device=DEVICE)
        return wrap(multiply_unscaled)(quantize(rows), quantize(weight), torch.ones((), device=DEVICE), out=out)

    want = multiply_rows(x)
    torch.testing.assert_close(want, multiply_rows(x, whole=True))
    for rows in ([7], [ROWS - 1, 0], [ROWS, 3, ROWS + 20], list(range(ROWS + 20, 2, -1))):
        assert torch.equal(multiply_rows(x[rows]), want[rows])


def test_tiles_of_one_order_add_float8_products_alike_for_any_number_of_tokens(monkeypatch):
    for gpu in configs.EXPERTS["fp8"]:
        monkeypatch.setattr(configs, "gpu_name", lambda device, gpu=gpu: gpu)
        tiles = [configs.expert_config(count, DEVICE, "fp8", one_order=True) for count in (1, 64, 256, 900, 1 << 20)]
        orders = {(tile.gate_up.cols, tile.gate_up.depth, tile.down.depth) for tile in tiles}
        assert len(orders) == 1
        assert tiles[2] == configs.expert_config(256, DEVICE, "fp8")


def test_the_dense_kernel_of_one_order_runs_for_any_number_of_tokens(monkeypatch):
    monkeypatch.setattr(configs, "gpu_name", lambda device: "NVIDIA H200")
    tiles = [configs.dense_config(count, DEVICE, one_order=True) for count in (1, 64, 256, 900, 1 << 20)]
    assert len({replace(tile, min_tokens=0, max_tokens=0, programs=1) for tile in tiles}) == 1
    assert configs.dense_config(1, DEVICE) is None
