"""`wrap`: tiny models of four published architectures, compared with sampling loops written from the papers."""

import pytest
import torch
import transformers

import dgemma
from dgemma.model.denoiser import Denoiser
from dgemma.train.batch import TrainBatch
from dgemma.train.likelihood import evaluate

VOCAB, MASK, EOS = 40, 39, 1
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": EOS,
    "initializer_range": 0.5,  # confident predictions, so that a misplaced token changes the result
}
# LLaDA is a Llama, and Dream is a Qwen2, but their attention is not causal. A mask over pairs of tokens achieves that.
ARCHITECTURES = {
    "llada": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES), {"attention_mask": "pairs"}),
    "dream": (
        transformers.Qwen2ForCausalLM,
        transformers.Qwen2Config(**SIZES, num_key_value_heads=1),
        {"attention_mask": "pairs", "shift": True},
    ),
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig(**SIZES), {}),
    "modernbert": (
        transformers.ModernBertForMaskedLM,
        transformers.ModernBertConfig(**SIZES, cls_token_id=2, sep_token_id=1),
        {},
    ),
}


def make(name):
    kind, config, options = ARCHITECTURES[name]
    torch.manual_seed(0)
    return dgemma.wrap(kind(config), canvas_len=8, mask_token_id=MASK, **options)


@pytest.fixture(scope="module")
def bert():
    return make("bert")


@pytest.fixture(scope="module", params=["bert", "dream"])
def wrapped(request):
    """Both forms of mask, and logits with and without a shift."""
    return make(request.param)


def logits_of(wrapped, row):
    """Logits (T, V) of one row without padding, as the published code computes them; the mask is never proposed."""
    attention_mask = torch.ones(1, 1, len(row), len(row)).bool() if wrapped.attention_mask == "pairs" else None
    with torch.no_grad():
        logits = wrapped.hf_model(input_ids=row[None], attention_mask=attention_mask).logits[0].double()
    if wrapped.shift:  # Dream: the logits at i - 1 predict token i
        logits = torch.cat((logits[:1], logits[:-1]))
    logits[:, MASK] = -torch.inf
    return logits


def llada(wrapped, prompt, *, gen_length, block_length, steps):
    """LLaDA's low-confidence remasking at temperature 0 (arXiv:2502.09992, algorithm 5), for one row."""
    row = torch.cat((prompt, torch.full((gen_length,), MASK)))
    num_blocks = gen_length // block_length
    for block in range(num_blocks):
        start = len(prompt) + block * block_length
        span = torch.zeros(len(row), dtype=torch.bool)
        span[start : start + block_length] = True
        base, remainder = divmod(block_length, steps // num_blocks)
        for step in range(steps // num_blocks):
            logits = logits_of(wrapped, row)
            confidence = logits.softmax(-1).amax(-1).masked_fill(~(span & (row == MASK)), -1.0)
            chosen = confidence.topk(base + (step < remainder)).indices
            row[chosen] = logits.argmax(-1)[chosen]
    return row[len(prompt) :]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(("block_length", "steps"), [(8, 3), (4, 4)], ids=["one-block", "semi-autoregressive"])
def test_tokens_are_those_of_lladas_published_loop(name, block_length, steps):
    wrapped = make(name)
    prompts = torch.tensor([[2, 7, 30, 11], [2, 21, 9, 5]])
    expected = [llada(wrapped, row, gen_length=8, block_length=block_length, steps=steps) for row in prompts]
    sampler = dgemma.Confidence(greedy=True, block_len=block_length)
    out = dgemma.generate(wrapped, prompts, sampler=sampler, steps=steps, eos_token_ids=())
    assert torch.equal(out.new_tokens, torch.stack(expected))
    assert out.steps.tolist() == [[steps], [steps]]


def test_the_defaults_are_lladas_one_token_per_step(wrapped):
    prompt = torch.tensor([[2, 7, 30, 11]])
    out = dgemma.generate(wrapped, prompt, eos_token_ids=())
    assert torch.equal(out.new_tokens[0], llada(wrapped, prompt[0], gen_length=8, block_length=8, steps=8))
    assert wrapped.generation.eos_token_id == (EOS,)


def test_a_second_canvas_sees_the_first_as_its_prefix(wrapped):
    prompt = torch.tensor([2, 7, 30])
    first = llada(wrapped, prompt, gen_length=8, block_length=8, steps=4)
    second = llada(wrapped, torch.cat((prompt, first)), gen_length=8, block_length=8, steps=4)
    out = dgemma.generate(wrapped, prompt[None], max_new_tokens=16, steps=4, eos_token_ids=())
    assert out.new_tokens[0].tolist() == first.tolist() + second.tolist()
    assert out.cache.lengths.tolist() == [19]


def test_rows_of_other_lengths_and_padding_on_either_side_change_nothing(wrapped):
    rows = [[2, 7, 30, 11, 6], [2, 21], [2, 9, 5]]
    tokens = torch.tensor([rows[0], [0, 0, 0, *rows[1]], [*rows[2], 0, 0]])
    real = torch.tensor([[1] * 5, [0, 0, 0, 1, 1], [1, 1, 1, 0, 0]])
    out = dgemma.generate(wrapped, tokens, attention_mask=real, steps=4, eos_token_ids=())
    for row, new_tokens in zip(rows, out.new_tokens, strict=True):
        assert torch.equal(new_tokens, llada(wrapped, torch.tensor(row), gen_length=8, block_length=8, steps=4))


def test_without_a_mask_rows_of_one_length_run_together(bert):
    plain = dgemma.wrap(bert.hf_model, canvas_len=8, mask_token_id=MASK, attention_mask="none")
    tokens = torch.tensor([[2, 7, 30], [2, 21, 0], [2, 9, 5]])
    real = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]])
    canvas = torch.full((3, 8), MASK)
    logits = [model.denoise(canvas, model.encode(tokens, None, real)).logits for model in (bert, plain)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


def test_a_cache_is_cloned_selected_and_spliced(bert):
    cache = bert.encode(torch.tensor([[2, 7, 30], [2, 21, 0]]), None, torch.tensor([[1, 1, 1], [1, 1, 0]]))
    copy = cache.clone()
    bert.encode(torch.tensor([[5, 6], [8, 9]]), cache)
    assert [row[:n].tolist() for row, n in zip(cache.tokens, cache.lengths, strict=True)] == [
        [2, 7, 30, 5, 6],
        [2, 21, 8, 9],
    ]
    assert copy.lengths.tolist() == [3, 2]
    cache.splice(torch.tensor([0]), copy.select(torch.tensor([0])))
    assert cache.lengths.tolist() == [3, 4]
    assert cache.num_seen == 5


def test_infilling_keeps_the_text_around_a_hole_and_sees_it(wrapped):
    text = torch.tensor([[2, 7, 30, 11, 6, 9, 21, 8, 14, 5]])
    filled = dgemma.infill(wrapped, text, [(3, 5)], steps=2)
    is_hole = torch.zeros(10, dtype=torch.bool)
    is_hole[3:5] = True
    assert torch.equal(filled.tokens[0, ~is_hole], text[0, ~is_hole])
    # The most confident of the two holes is written first. The canvas ends one position after the text.
    row = torch.cat((torch.where(is_hole, MASK, text[0]), torch.tensor([MASK] * (11 - 10))))
    logits = logits_of(wrapped, row)
    first = 3 + int(logits[3:5].softmax(-1).amax(-1).argmax())
    assert filled.tokens[0, first] == logits[first].argmax()


class Plain(Denoiser):
    """A DiffusionGemma that shows nothing but the interface of a denoiser."""

    has_causal_mode = True

    def __init__(self, model):
        self.model, self.generation, self.device = model, model.generation, model.device
        self.config, self.takes_noise_level = model.config, model.takes_noise_level
        self.takes_position_levels = model.takes_position_levels
        self.encode, self.denoise, self.causal_logits = model.encode, model.denoise, model.causal_logits


@pytest.mark.parametrize(("kind", "self_cond", "conditioned"), [("mask", True, False), ("uniform", False, True)])
def test_a_denoiser_is_evaluated_canvas_by_canvas_as_in_one_pass(kind, self_cond, conditioned):
    torch.manual_seed(1)
    config = dgemma.presets.tiny().replace(
        vocab_size=VOCAB,
        canvas_length=4,
        num_hidden_layers=2,
        layer_types=("sliding_attention", "full_attention"),
        num_experts=4,
        noise_conditioning=conditioned,
    )
    model = dgemma.DiffusionGemma(config)
    noise = dgemma.UniformNoise(VOCAB) if kind == "uniform" else dgemma.MaskNoise(VOCAB, mask_token_id=MASK)
    batch = TrainBatch(
        tokens=torch.randint(5, MASK, (3, 9)),
        prompt_len=torch.tensor([1, 3, 2]),
        length=torch.tensor([9, 9, 6]),
        truncated=torch.tensor([False, True, False]),
    )
    one, other = (
        evaluate(each, batch, noise, num_samples=2, self_cond=self_cond).rows for each in (model, Plain(model))
    )
    torch.testing.assert_close(other.nats, one.nats, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(other.causal, one.causal, atol=1e-4, rtol=1e-5)


def test_models_that_do_not_fit_are_refused_in_a_sentence(bert):
    causal = transformers.LlamaForCausalLM(ARCHITECTURES["llada"][1])
    with pytest.raises(ValueError, match=r'must see tokens to the right.*Pass attention_mask="pairs"'):
        dgemma.wrap(causal, canvas_len=8, mask_token_id=MASK)
    with pytest.raises(ValueError, match="mask_token_id must be an id below the vocabulary's 40, got None"):
        dgemma.wrap(bert.hf_model, canvas_len=8)
    with pytest.raises(ValueError, match=r"attention_mask must be .*, got 'full'"):
        dgemma.wrap(bert.hf_model, canvas_len=8, mask_token_id=MASK, attention_mask="full")
    with pytest.raises(ValueError, match="must stay within max_position_embeddings 64, got 66"):
        dgemma.generate(bert, torch.tensor([[2, 7]]), max_new_tokens=64)

    class Deaf(torch.nn.Module):
        """A model that ignores its attention mask, as early LLaDA code did."""

        def __init__(self):
            super().__init__()
            self.inner, self.config = bert.hf_model, bert.hf_model.config

        def forward(self, input_ids, attention_mask=None):
            return self.inner(input_ids=input_ids)

    with pytest.raises(ValueError, match=r'must ignore padding, got Deaf.*Pass attention_mask="none"'):
        dgemma.wrap(Deaf(), canvas_len=8, mask_token_id=MASK)
    assert dgemma.wrap(Deaf(), canvas_len=8, mask_token_id=MASK, attention_mask="none").config.vocab_size == VOCAB


def test_what_needs_a_diffusion_gemma_says_so(bert):
    tokens = torch.tensor([[2, 7, 30]])
    with pytest.raises(TypeError, match="generate_causal model must have a causal mode, got Wrapped"):
        dgemma.generate_causal(bert, tokens)
    packed = TrainBatch(
        tokens=tokens, prompt_len=torch.tensor([1]), length=torch.tensor([3]), documents=torch.tensor([[0, 0, 1]])
    )
    with pytest.raises(ValueError, match="must have one text per row for a Wrapped, got rows that pack several"):
        evaluate(bert, packed, dgemma.MaskNoise(VOCAB, mask_token_id=MASK))
