"""The objective equals the same loss written out with `encode`, `denoise` and torch's cross-entropy per row."""

import itertools
import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dgemma
from dgemma import DiffusionGemma, HybridNoise, MaskNoise, UniformNoise
from dgemma.diffusion.schedule import ClippedLinear, OneMinusCosine
from dgemma.train import Bound, CrossEntropy, LeaveOneOut, Loss, RowMean, TrainBatch, nelbo, one_pass
from dgemma.train.objective import Objective
from dgemma_kernels import accelerate_training

VOCAB, CANVAS_LEN, EOS, MASK = 40, 6, 1, 4
CONFIG = dgemma.presets.tiny().replace(
    vocab_size=VOCAB, canvas_length=CANVAS_LEN, sliding_window=9, hidden_size=32, num_experts=4, num_hidden_layers=2,
    layer_types=("sliding_attention", "full_attention"),
)  # fmt: skip
# Answers of 15, 6 and 1 tokens: three canvases with a partial last one, exactly one, and one of mostly fill.
BATCH = TrainBatch(
    tokens=torch.arange(3 * 20).reshape(3, 20) % (VOCAB - 6) + 5,
    prompt_len=torch.tensor([3, 0, 7]),
    length=torch.tensor([18, 6, 8]),
)
SEEDS = torch.tensor([11, 12, 13])


@pytest.fixture(scope="module")
def model() -> DiffusionGemma:
    torch.manual_seed(1)
    model = DiffusionGemma(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def make(**fields) -> Objective:
    return Objective(**{"noise": UniformNoise(VOCAB), "canvas_len": CANVAS_LEN, "fill_token": EOS, **fields})


def mask_bound(**fields) -> Objective:
    plain = {"causal_weight": 0.0, "self_cond_prob": 0.0, "loss": Bound()}
    return make(**{"noise": MaskNoise(VOCAB, mask_token_id=MASK), **plain, **fields})


@pytest.fixture
def calls(monkeypatch) -> list[dict]:
    """The arguments of every call of the network: canvases, their starts, the clean text and the signal."""
    calls: list[dict] = []
    real = one_pass.predict_canvases

    def spy(model, canvases, starts, clean=None, masks=None, **options):
        calls.append({"z": canvases, "starts": starts, "clean": clean, "masks": masks, **options})
        return real(model, canvases, starts, clean, masks, **options)

    monkeypatch.setattr(one_pass, "predict_canvases", spy)
    return calls


def filled(row: int, batch: TrainBatch = BATCH) -> Tensor:
    """Return the prompt and answer of a row, filled to the end of the last canvas."""
    prompt, length = int(batch.prompt_len[row]), int(batch.length[row])
    end = prompt + math.ceil((length - prompt) / CANVAS_LEN) * CANVAS_LEN
    return torch.cat([batch.tokens[row, :length], torch.full((end - length,), EOS)])


def denoised(model: DiffusionGemma, text: Tensor, z: Tensor, start: int, **options) -> Tensor:
    """Return the logits (C, V) of one canvas of one row."""
    return model.denoise(z[None], model.encode(text[None, :start]), **options).logits[0]


@pytest.mark.parametrize(("canvases", "num_draws"), [("one", 1), ("all", 1), ("one", 3), ("all", 2)])
@pytest.mark.parametrize("self_cond_prob", [0.0, 1.0, 0.5])
def test_the_published_loss_equals_the_loss_written_out_by_hand(model, calls, canvases, num_draws, self_cond_prob):
    terms = make(canvases=canvases, num_draws=num_draws, self_cond_prob=self_cond_prob)(model, BATCH, seeds=SEEDS)
    last = calls[-1]
    for row in range(3):
        text = filled(row)
        total, count = torch.zeros(()), 0
        for k in range(last["z"].shape[1]):
            start, z = int(last["starts"][row, k]), last["z"][row, k]
            if start >= BATCH.length[row]:
                continue
            on = last["signal"] is not None and bool(last["signal"][row, k].abs().sum() > 0)
            first = denoised(model, text, z, start).detach()
            logits = denoised(model, text, z, start, self_cond=first[None] if on else None)
            total, count = total + F.cross_entropy(logits, text[start : start + CANVAS_LEN], reduction="sum"), count + 6
        causal = model.causal_logits(text[None, :-1])[0]
        torch.testing.assert_close(terms.sums["decoder"][row], total, atol=1e-3, rtol=1e-4)
        expected = F.cross_entropy(causal, text[1:], reduction="sum")
        torch.testing.assert_close(terms.sums["causal"][row], expected, atol=1e-3, rtol=1e-4)
        assert terms.counts["decoder"][row] == count
        assert terms.counts["causal"][row] == len(text) - 1


def test_self_conditioning_is_drawn_for_each_canvas_of_each_row(model, calls):
    rows = BATCH.select(torch.zeros(200, dtype=torch.int64))
    with torch.no_grad():
        make(canvases="all", self_cond_prob=0.25)(model, rows, seeds=torch.arange(200))
    on = calls[-1]["signal"].abs().sum((2, 3)) > 0  # (200, 3)
    assert len(calls) == 2
    assert abs(on.float().mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 600)
    assert (on.any(1) & ~on.all(1)).sum() > 0


def test_self_cond_off_gives_no_signal_or_the_mean_embedding(model, calls):
    for form in ("zero_signal", "zero_logits"):
        make(self_cond_prob=0.0, self_cond_off=form)(model, BATCH, seeds=SEEDS)
    assert calls[0]["signal"] is None
    mean = model.embed_tokens.weight.mean(0) * math.sqrt(CONFIG.hidden_size)
    torch.testing.assert_close(calls[1]["signal"], mean.expand_as(calls[1]["signal"]), atol=1e-5, rtol=1e-5)


def test_the_first_pass_is_detached_and_the_embedding_learns_through_the_second(model):
    # With self-conditioning always on, the published graph is a first pass, detached logits, then a second pass.
    batch = BATCH.select(slice(1, 2))
    actual = make(self_cond_prob=1.0, causal_weight=0.0)
    model.zero_grad()
    actual.reduce(actual(model, batch, seeds=SEEDS[1:2])).backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    z = actual.draw(batch, SEEDS[1:2]).noisy.z[0, 0]
    model.zero_grad()
    first = denoised(model, filled(1), z, 0).detach()
    F.cross_entropy(denoised(model, filled(1), z, 0, self_cond=first[None]), filled(1)).backward()
    for name, grad in ours.items():
        theirs = model.get_parameter(name).grad
        assert (grad - theirs).norm() < 1e-3 * theirs.norm() + 1e-6, name


def test_one_canvas_is_drawn_uniformly_and_no_other_is_computed(model, calls):
    rows = BATCH.select(torch.zeros(300, dtype=torch.int64))
    with torch.no_grad():
        make(self_cond_prob=0.0)(model, rows, seeds=torch.arange(300))
    assert calls[0]["z"].shape == (300, 1, CANVAS_LEN)
    index = (calls[0]["starts"][:, 0] - 3) // CANVAS_LEN
    counts = torch.bincount(index, minlength=3)
    assert len(counts) == 3
    assert (counts - 100).abs().max() < 4 * math.sqrt(300 * 2 / 9)


def test_a_canvas_has_the_same_noise_alone_and_among_all(model, calls):
    make(self_cond_prob=0.0)(model, BATCH, seeds=SEEDS)
    make(self_cond_prob=0.0, canvases="all")(model, BATCH, seeds=SEEDS)
    one, every = calls
    for row in range(3):
        k = int(one["starts"][row, 0] - BATCH.prompt_len[row]) // CANVAS_LEN
        assert torch.equal(one["z"][row, 0], every["z"][row, k])


def test_further_draws_of_a_canvas_have_other_noise_at_another_time():
    once, twice = (make(canvases="all", num_draws=count).draw(BATCH, SEEDS).noisy for count in (1, 2))
    num_canvases = once.z.shape[1]
    assert torch.equal(twice.z[:, :num_canvases], once.z)
    assert not torch.equal(twice.z[:, num_canvases:], once.z)
    assert (twice.level[:, num_canvases:] != once.level).all()


def test_without_a_causal_term_only_the_text_before_canvases_is_read(model, calls):
    single = replace(BATCH, prompt_len=torch.tensor([4, 4, 4]), length=torch.tensor([10, 10, 7]))
    make(self_cond_prob=0.0, causal_weight=0.0)(model, single, seeds=SEEDS)
    assert calls[0]["clean"].hidden.shape[1] == 4
    assert set(calls[0]["masks"]) == {None}
    without_prompt = replace(BATCH, prompt_len=torch.zeros(3, dtype=torch.int64), length=torch.tensor([6, 6, 6]))
    make(self_cond_prob=0.0, causal_weight=0.0)(model, without_prompt, seeds=SEEDS)
    assert calls[1]["clean"] is None


# Row 0: prompt 3, answer 15, fill 3. Row 1: answer 6. Row 2: prompt 7, answer 1, fill 5.
@pytest.mark.parametrize(
    ("fields", "decoder", "causal"),
    [
        ({}, [18, 6, 6], [20, 5, 12]),
        ({"causal_fill": False}, [18, 6, 6], [17, 5, 7]),
        ({"causal_scope": "answer"}, [18, 6, 6], [18, 5, 6]),
        ({"causal_scope": "answer", "causal_fill": False}, [18, 6, 6], [15, 5, 1]),
        ({"truncated": "unscored"}, [15, 6, 6], [17, 5, 12]),
        ({"truncated": "rejected"}, [0, 6, 6], [0, 5, 12]),
    ],
)
def test_the_scored_positions_are_those_counted_by_hand(model, fields, decoder, causal):
    cut = replace(BATCH, truncated=torch.tensor([True, False, False]))
    loss = make(canvases="all", self_cond_prob=0.0, **fields)
    with torch.no_grad():
        terms = loss(model, cut, seeds=SEEDS)
    assert terms.counts["decoder"].tolist() == decoder
    assert terms.counts["causal"].tolist() == causal
    totals = loss.total_counts(cut, SEEDS)
    assert (totals["decoder"], totals["causal"]) == (sum(decoder), sum(causal))
    num_rows = 2 if fields.get("truncated") == "rejected" else 3
    assert (totals["decoder_rows"], totals["causal_rows"], totals["micro_batches"]) == (num_rows, num_rows, 1)
    for name, count in (("decoder", decoder), ("causal", causal)):
        assert [bool(s > 0) for s in terms.sums[name]] == [c > 0 for c in count]


def test_padding_and_its_values_do_not_matter(model):
    garbage = BATCH.tokens.clone()
    for row, length in enumerate(BATCH.length.tolist()):
        garbage[row, length:] = 33
    wider = TrainBatch(tokens=F.pad(garbage, (0, 9), value=7), prompt_len=BATCH.prompt_len, length=BATCH.length)
    loss = make(canvases="all")
    for name in ("decoder", "causal"):
        torch.testing.assert_close(
            loss(model, wider, seeds=SEEDS).sums[name], loss(model, BATCH, seeds=SEEDS).sums[name]
        )


def test_frozen_tokens_are_never_noised_and_never_scored(model, calls):
    frozen = torch.zeros(3, 20, dtype=torch.bool)
    frozen[0, [4, 5, 17]] = True
    batch = replace(BATCH, frozen=frozen)
    loss = make(canvases="all", noise=MaskNoise(VOCAB, mask_token_id=MASK), t_range=(1.0, 1.0), self_cond_prob=0.0)
    terms = loss(model, batch, seeds=SEEDS)
    shown = calls[0]["z"][0].flatten()  # canvases start at 3
    assert [position + 3 for position in (shown != MASK).nonzero()[:, 0].tolist()] == [4, 5, 17]
    assert torch.equal(shown[[1, 2, 14]], BATCH.tokens[0, [4, 5, 17]])
    assert terms.counts["decoder"].tolist() == [15, 6, 6]
    assert terms.counts["causal"].tolist() == [17, 5, 12]


def test_random_noise_draws_from_the_allowed_ids_at_the_rate_t(model, calls):
    rows = BATCH.select(torch.zeros(300, dtype=torch.int64))
    plain = {"canvases": "all", "self_cond_prob": 0.0, "causal_weight": 0.0}
    loss = make(**plain, t_range=(0.3, 0.3), allowed=(2, 3), loss=CrossEntropy(scored="noised"))
    with torch.no_grad():
        terms = loss(model, rows, seeds=torch.arange(300))
    z, x = calls[0]["z"].flatten(1), filled(0)[3:].expand(300, -1)
    assert set(z[z != x].tolist()) == {2, 3}  # neither occurs in the text
    rate, num = (z != x).double().mean().item(), z.numel()
    assert abs(rate - 0.3) < 4 * math.sqrt(0.3 * 0.7 / num)
    assert torch.equal(terms.counts["decoder"], (z != x).sum(1))


def test_times_are_uniform_on_their_range_and_independent_between_canvases():
    loss = make(canvases="all", t_range=(0.2, 0.6), noise=UniformNoise(VOCAB, schedule=OneMinusCosine()))
    rows = BATCH.select(torch.zeros(4000, dtype=torch.int64))
    seeds = torch.arange(4000)
    level = loss.draw(rows, seeds).noisy.level  # (4000, 3)
    time = OneMinusCosine().time(1 - level)
    assert time.min() >= 0.2 - 1e-9
    assert time.max() <= 0.6 + 1e-9
    assert (time.mean(0) - 0.4).abs().max() < 4 * 0.4 / math.sqrt(12 * 4000)
    correlation = torch.corrcoef(time.T) - torch.eye(3)
    assert correlation.abs().max() < 4 / math.sqrt(4000)


def test_the_expected_mask_loss_is_the_bound_for_every_schedule(model):
    text = torch.tensor([7, 21, 9])
    cost = {}
    for hidden in itertools.product([False, True], repeat=3):
        if any(hidden):
            where = torch.tensor(hidden)
            logits = _without(denoised(model, text, torch.where(where, MASK, text), 0), MASK)
            cost[hidden] = (F.cross_entropy(logits, text, reduction="none") * where).sum().item()
    fact = math.factorial
    exact = sum(fact(sum(m) - 1) * fact(3 - sum(m)) / fact(3) * value for m, value in cost.items())
    num = 10_000
    batch = TrainBatch(tokens=text.expand(num, -1), prompt_len=torch.zeros(num).long(), length=torch.full((num,), 3))
    for schedule in (OneMinusCosine(), ClippedLinear(low=0.0, high=1.0)):
        noise = MaskNoise(VOCAB, mask_token_id=MASK, schedule=schedule)
        with torch.no_grad():
            terms = mask_bound(canvas_len=3, noise=noise, t_range=(0.0, 1.0))(model, batch, seeds=torch.arange(num))
        sums = terms.sums["decoder"].double()
        assert abs(sums.mean() - exact) < 4 * sums.std() / math.sqrt(num)


@pytest.mark.parametrize("parametrisation", ["mean", "loo"])
@pytest.mark.parametrize("noise", [UniformNoise(VOCAB), HybridNoise(VOCAB, mask_token_id=MASK)], ids=["duo", "gidd"])
def test_the_other_bounds_are_those_of_nelbo(model, calls, noise, parametrisation):
    loss = mask_bound(noise=noise, canvases="all", loss=Bound(parametrisation=parametrisation), t_range=(0.4, 0.4))
    actual = loss(model, BATCH, seeds=SEEDS)
    for row in range(3):
        text, total = filled(row), torch.zeros(())
        for k in range(3):
            start, z = int(calls[0]["starts"][row, k]), calls[0]["z"][row, k]
            if start < BATCH.length[row]:
                logits, x = denoised(model, text, z, start)[None], text[None, start : start + CANVAS_LEN]
                level = torch.tensor([0.4], dtype=torch.float64)
                total = total + nelbo.integrand(noise, logits, x, z[None], level, parametrisation=parametrisation).sum()
        torch.testing.assert_close(actual.sums["decoder"][row], total, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("weights", ["clipped", "dynamic"])
def test_gidd_trains_with_clipped_or_dynamic_weights(model, calls, weights):
    t, noise = 0.4, HybridNoise(VOCAB, mask_token_id=MASK, uniform_share=0.3)
    bound = Bound(parametrisation="loo", weights="exact" if weights == "clipped" else weights, max_weight=1.5)
    loss = mask_bound(noise=noise, loss=bound, t_range=(t, t))
    batch, rows = BATCH.select(torch.ones(12, dtype=torch.int64)), torch.arange(12)
    actual = loss(model, batch, seeds=rows)
    z, x = calls[0]["z"][:, 0], batch.tokens[:, :6]
    logits = model.denoise(z, model.encode(x[:, :0])).logits
    level = torch.full((12,), t, dtype=torch.float64)
    divergence = nelbo.integrand(noise, logits, x, z, level, parametrisation="loo", weights=torch.ones(12, 6))
    # The weights of the paper at gamma = 1, with c' = c (1 - 2t) / (2t(1 - t)).
    num = VOCAB - 1
    c = 2 * 0.3 / 0.7 * math.sqrt(t * (1 - t))
    slope = c + (1 - t) * c * (1 - 2 * t) / (2 * t * (1 - t))
    exact = {
        "mask": 1 / (t * (1 - t)),
        "clean": slope / (num * (1 - t) * (1 - t + c / num)),
        "other": slope / ((1 - t) * c),
    }
    dynamic = {"mask": 2.0, "clean": 2 * 0.3 / 0.7 / num * math.sqrt(t / (1 - t)), "other": 1.0}
    chosen = {name: min(1.5, w) for name, w in (exact if weights == "clipped" else dynamic).items()}
    weight = torch.where(z == MASK, chosen["mask"], torch.where(z == x, chosen["clean"], chosen["other"]))
    assert {"mask", "clean", "other"} == {
        name for name, at in (("mask", z == MASK), ("clean", z == x), ("other", (z != x) & (z != MASK))) if at.any()
    }
    torch.testing.assert_close(actual.sums["decoder"], (weight * divergence).sum(1), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("allowed", [None, tuple(range(5, 30))])
def test_the_leave_one_out_loss_is_the_cross_entropy_of_its_mean(model, calls, allowed):
    loss = make(loss=LeaveOneOut(), self_cond_prob=0.0, causal_weight=0.0, t_range=(0.4, 0.4), allowed=allowed)
    batch = BATCH.select(slice(1, 2))
    actual = loss(model, batch, seeds=SEEDS[1:2])
    z, x = calls[0]["z"][0, 0], batch.tokens[0, :6]
    if allowed is None:
        evidence = torch.full((6,), math.log(1 + VOCAB * 0.6 / 0.4))
    else:  # noise cannot give this token, so it must be clean
        evidence = torch.where((z >= 5) & (z < 30), math.log(1 + 25 * 0.6 / 0.4), 1e3)
    assert len(set(evidence.tolist())) == (1 if allowed is None else 2)
    logits = denoised(model, x, z, 0) + F.one_hot(z, VOCAB) * evidence[:, None]
    torch.testing.assert_close(
        actual.sums["decoder"][0], F.cross_entropy(logits, x, reduction="sum"), atol=1e-4, rtol=1e-4
    )


def test_micro_batches_add_up_to_the_step_under_every_reduction(model):
    def split(loss: Objective) -> tuple[Tensor, list]:
        cuts = [slice(0, 1), slice(1, 3)]
        terms = [loss(model, BATCH.select(rows), seeds=SEEDS[rows]) for rows in cuts]
        counts = [loss.total_counts(BATCH.select(rows), SEEDS[rows]) for rows in cuts]
        totals = {name: sum(count[name] for count in counts) for name in counts[0]}
        # The two micro-batches belong to two processes.
        own = [{f"process/{name}": count[name] for name in count} | {"processes": 2} for count in counts]
        return torch.stack([loss.reduce(t, totals | o) for t, o in zip(terms, own, strict=True)]).sum(), terms

    def value(reduction: str) -> float:
        return split(make(canvases="all", self_cond_prob=0.0, causal_weight=0.0, reduction=reduction))[0].item()

    loss = make(canvases="all", self_cond_prob=0.0, causal_weight=0.0)
    sums, counts = (getattr(loss(model, BATCH, seeds=SEEDS), name)["decoder"] for name in ("sums", "counts"))
    per_part = [sums[0] / counts[0], sums[1:].sum() / counts[1:].sum()]
    assert value("global") == pytest.approx((sums.sum() / counts.sum()).item(), rel=1e-5)
    assert value("example") == pytest.approx((sums / counts).mean().item(), rel=1e-5)
    assert value("micro_batch") == pytest.approx((sum(per_part) / 2).item(), rel=1e-5)
    assert value("process") == pytest.approx((sum(per_part) / 2).item(), rel=1e-5)
    # For one micro-batch of one process, the last two are the token mean.
    whole = make(canvases="all", self_cond_prob=0.0, causal_weight=0.0, reduction="micro_batch")
    assert whole.reduce(whole(model, BATCH, seeds=SEEDS)).item() == pytest.approx(value("global"), rel=1e-5)


@pytest.mark.parametrize("cuts", [[(0, 3)], [(0, 1), (1, 3)], [(0, 2), (2, 3)]])
def test_a_mean_of_examples_skips_rows_without_scored_positions(model, cuts):
    """Row 0 is rejected. Row 1 has no answer, but a prompt that the causal term scores."""
    batch = replace(BATCH, prompt_len=torch.tensor([3, 6, 7]), truncated=torch.tensor([True, False, False]))
    loss = make(canvases="all", self_cond_prob=0.0, truncated="rejected", reduction="example")
    one, two = (loss(model, batch.select(slice(row, row + 1)), seeds=SEEDS[row : row + 1]) for row in (1, 2))
    # The last row's 6 canvas positions, and the means over 5 and 12 next tokens.
    expected = two.sums["decoder"] / 6 + (one.sums["causal"] / 5 + two.sums["causal"] / 12) / 2
    parts = [(batch.select(slice(*cut)), SEEDS[slice(*cut)]) for cut in cuts]
    counts = [loss.total_counts(*part) for part in parts]
    totals = {name: sum(count[name] for count in counts) for name in counts[0]}
    actual = sum(loss.reduce(loss(model, rows, seeds=seeds), totals) for rows, seeds in parts)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.reduce(loss(model, batch, seeds=SEEDS)).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_weights_of_the_terms_scale_them(model):
    loss = make(decoder_weight=0.5, causal_weight=2.0)
    terms = loss(model, BATCH, seeds=SEEDS)
    decoder, causal = (terms.sums[name].sum() / terms.counts[name].sum() for name in ("decoder", "causal"))
    torch.testing.assert_close(loss.reduce(terms), 0.5 * decoder + 2.0 * causal)
    assert set(make(decoder_weight=0.0)(model, BATCH, seeds=SEEDS).sums) == {"causal"}


@pytest.mark.parametrize(
    ("noise", "ids"),
    [(UniformNoise(VOCAB), (7, 8, 9)), (MaskNoise(VOCAB, mask_token_id=MASK), None)],
    ids=["allowed", "all but the mask"],
)
def test_self_conditioning_is_over_the_tokens_that_generate_may_propose(model, calls, noise, ids):
    loss = make(noise=noise, allowed=ids, self_cond_prob=1.0, causal_weight=0.0, t_range=(0.9, 0.9))
    loss(model, BATCH, seeds=SEEDS)
    first, second = calls
    hidden = one_pass.predict_canvases(model, first["z"], first["starts"], first["clean"])
    allowed = torch.tensor([token in (ids or range(VOCAB)) and token != noise.mask_token for token in range(VOCAB)])
    raw = model._head(hidden.flatten(0, 1))
    expected = model.soft_embedding(raw.shaped(allowed=allowed)).view_as(second["signal"])
    torch.testing.assert_close(second["signal"], expected, rtol=1e-4, atol=1e-4)
    everywhere = model.soft_embedding(raw).view_as(expected)
    assert (everywhere - expected).abs().max() > 0.01  # otherwise the test would prove nothing


@pytest.mark.parametrize("causal_fill", [True, False])
def test_packed_texts_are_scored_as_if_each_were_alone_and_their_fill_is_fill(model, causal_fill):
    """Texts of 8 and 4 tokens, filled to whole canvases by packing, or by the objective."""
    texts = torch.arange(5, 5 + 24).view(2, 12)
    lengths, place = torch.tensor([8, 4]), torch.arange(12)
    filled = torch.where(place < lengths[:, None], texts, EOS)
    packed = TrainBatch(
        tokens=torch.cat((filled[0], filled[1, :6]))[None],
        prompt_len=torch.tensor([0]),
        length=torch.tensor([18]),
        documents=torch.tensor([[0] * 12 + [1] * 6]),
        fill=torch.cat((place >= 8, place[:6] >= 4))[None],
    )
    alone = TrainBatch(tokens=texts, prompt_len=torch.tensor([0, 0]), length=lengths)
    loss = make(canvases="all", self_cond_prob=0.0, t_range=(0.0, 0.0), causal_fill=causal_fill)
    actual, expected = loss(model, packed, seeds=SEEDS[:1]), loss(model, alone, seeds=SEEDS[:2])
    for name in ("decoder", "causal"):
        torch.testing.assert_close(actual.sums[name].sum(), expected.sums[name].sum(), atol=2e-2, rtol=1e-4)
        assert actual.counts[name].sum() == expected.counts[name].sum()
    assert actual.counts["decoder"].item() == 18  # the decoder always has to write the fill
    assert actual.counts["causal"].item() == (16 if causal_fill else 10)
    counted = loss.total_counts(packed, SEEDS[:1])
    assert counted["causal"] == actual.counts["causal"].sum()


def test_a_network_that_takes_the_level_gets_the_level_of_each_canvas(calls):
    conditioned = DiffusionGemma(CONFIG.replace(noise_conditioning=True))
    make(canvases="all", self_cond_prob=0.0)(conditioned, BATCH, seeds=SEEDS)
    level = calls[0]["noise_level"]
    assert level.shape == (3, 3, CANVAS_LEN)
    assert (level == level[..., :1]).all()
    assert len(set(level.flatten().tolist())) == 9


def test_canvases_with_holes_freeze_what_is_between_them(calls):
    """2,000 canvases of six tokens. Frozen tokens keep their value, have level 0 and are not scored."""
    rows = 2000
    conditioned = DiffusionGemma(CONFIG.replace(noise_conditioning=True))
    tokens = torch.full((rows, 7), 9)
    ones = torch.ones(rows, dtype=torch.int64)
    batch = TrainBatch(tokens=tokens, prompt_len=ones, length=7 * ones)
    loss = make(self_cond_prob=0.0, causal_weight=0.0, t_range=(1.0, 1.0), holes_prob=0.5)
    counts = loss(conditioned, batch, seeds=torch.arange(rows)).counts["decoder"]
    level = calls[0]["noise_level"][:, 0]  # (rows, 6)
    frozen = level == 0
    assert (level[~frozen] == 1).all()
    assert torch.equal(counts, (~frozen).sum(1))
    assert torch.equal(counts.sum(), loss.total_counts(batch, torch.arange(rows))["decoder"])
    assert (calls[0]["z"][:, 0][frozen] == 9).all()

    # Frozen stretches have 1 to 6 tokens, holes 1 to 3: length n has the probability log(1 + 1/n) / log(1 + longest).
    def patterns(kind: str, length: int) -> Counter[str]:
        """The probabilities of canvases of this length that begin with a hole "_" or with frozen "x"."""
        longest, other, found = (6, "_", Counter()) if kind == "x" else (3, "x", Counter())
        for n in range(1, longest + 1):
            probability = math.log(1 + 1 / n) / math.log(1 + longest)
            rests = patterns(other, length - n) if n < length else {"": 1.0}
            for rest, share in rests.items():
                found[kind * min(n, length) + rest] += probability * share
        return found

    found = Counter("".join("_x"[is_frozen] for is_frozen in row) for row in frozen.tolist())
    whole = Counter({"______": 2.0})  # half of the canvases have no frozen token
    for pattern, weight in (patterns("x", 6) + patterns("_", 6) + whole).items():
        expected = weight / 4
        assert abs(found.pop(pattern, 0) / rows - expected) < 4.5 * math.sqrt(expected * (1 - expected) / rows)
    assert not found


def test_each_canvas_has_the_noise_and_the_loss_of_one_of_two_noises(model, calls):
    """The rows with masks equal those of mask noise alone, the others those of uniform noise alone."""
    rows, seeds = BATCH.select(torch.zeros(600, dtype=torch.int64)), torch.arange(600)
    masks = MaskNoise(VOCAB, mask_token_id=MASK)
    plain = {"self_cond_prob": 0.0, "causal_weight": 0.0, "t_range": (0.9, 0.9)}
    losses = [
        make(masks=masks, masks_prob=0.25, **plain),
        make(**plain),
        make(noise=masks, loss=CrossEntropy(scored="noised", propose_mask=True), **plain),
    ]
    with torch.no_grad():
        both, uniform, masked = (loss(model, rows, seeds=seeds) for loss in losses)
    z = [call["z"][:, 0] for call in calls]
    is_masked = (z[0] == z[2]).all(1) & (z[0] != z[1]).any(1)
    assert torch.equal(z[0], torch.where(is_masked[:, None], z[2], z[1]))
    for name in ("sums", "counts"):
        found, of_uniform, of_masks = (getattr(terms, name)["decoder"] for terms in (both, uniform, masked))
        torch.testing.assert_close(found, torch.where(is_masked, of_masks, of_uniform))
    assert torch.equal(both.counts["decoder"].sum(), losses[0].total_counts(rows, seeds)["decoder"])
    assert abs(is_masked.float().mean().item() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 600)


def test_the_loss_runs_under_autocast_with_recomputed_activations(model):
    loss = make(canvases="all")
    plain = loss.reduce(loss(model, BATCH, seeds=SEEDS))
    model.zero_grad()
    model.recompute_activations = True
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        rough = loss.reduce(loss(model, BATCH, seeds=SEEDS))
    rough.backward()
    model.recompute_activations = False
    assert rough.dtype == torch.float32
    assert abs(rough - plain) < 0.1 * plain
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"t_range": (0.5, 0.2)}, "t_range must satisfy"),
        ({"causal_weight": 0.0, "decoder_weight": 0.0}, "causal_weight must be > 0 if decoder_weight is 0"),
        ({"loss": Bound(weights="dynamic")}, "noise must be HybridNoise for dynamic weights"),
        ({"loss": Bound(propose_mask=True)}, "noise must be MaskNoise to propose masks"),
        ({"loss": CrossEntropy(propose_mask=True)}, "propose_mask must be False"),
        ({"loss": LeaveOneOut(), "noise": MaskNoise(VOCAB)}, "noise must be UniformNoise with LeaveOneOut"),
        ({"allowed": (1, VOCAB)}, "allowed must be ids"),
        ({"loss": Bound(), "allowed": (1, 2)}, "allowed must be None"),
        ({"loss": Bound(), "masks": MaskNoise(VOCAB)}, "masks must have .* loss be CrossEntropy"),
        ({"masks": MaskNoise(41)}, "masks must have the noise's 40 tokens"),
    ],
)
def test_an_impossible_objective_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        make(**fields)


class Squares(Loss):
    """The squared distance of the prediction from the clean token's one-hot vector."""

    def of_logits(self, noise, logits, x, z, level):
        return (logits.softmax(-1) - F.one_hot(x[:, 0], VOCAB)).square().sum(-1)


def test_a_loss_of_ones_own_is_a_function_of_the_logits_at_each_position(model, calls):
    loss = make(loss=Squares(), canvases="all", self_cond_prob=0.0, causal_weight=0.0)
    sums = loss(model, BATCH, seeds=SEEDS).sums["decoder"]
    text, z = filled(1), calls[0]["z"][1, 0]  # the row with one canvas
    distance = denoised(model, text, z, 0).softmax(-1) - F.one_hot(text, VOCAB)
    torch.testing.assert_close(sums[1], distance.square().sum(), atol=1e-5, rtol=1e-4)


def test_losses_of_a_wrong_shape_are_refused(model):
    class Total(Squares):
        def of_logits(self, *parts):
            return super().of_logits(*parts).sum()

    with pytest.raises(ValueError, match=r"Total\.of_logits must return one cost per row, \(\d+,\), got"):
        make(loss=Total())(model, BATCH, seeds=SEEDS)
    with pytest.raises(ValueError, match=r"RowMean\.losses must return one loss per row, \(\d+,\), got"):
        RowMean(lambda model, batch, seeds: torch.zeros(()))(model, BATCH, seeds=SEEDS)


def test_a_mean_of_rows_adds_up_over_micro_batches():
    loss = RowMean(lambda model, batch, seeds: batch.length * seeds.double())
    whole = loss.reduce(loss(None, BATCH, seeds=SEEDS))
    parts = [(BATCH.select(rows), SEEDS[rows]) for rows in (slice(0, 1), slice(1, 3))]
    totals = {"row": sum(loss.total_counts(*part)["row"] for part in parts)}
    assert whole.item() == pytest.approx((18 * 11 + 6 * 12 + 8 * 13) / 3)
    shares = [loss.reduce(loss(None, batch, seeds=seeds), totals).item() for batch, seeds in parts]
    assert sum(shares) == pytest.approx(whole.item())


def test_batches_that_do_not_fit_the_model_are_refused(model):
    with pytest.raises(ValueError, match="noise must cover the model's 40 tokens"):
        make(noise=UniformNoise(41))(model, BATCH, seeds=SEEDS)
    with pytest.raises(ValueError, match="max_position_embeddings"):
        make()(DiffusionGemma(CONFIG.replace(max_position_embeddings=16)), BATCH, seeds=SEEDS)


@pytest.mark.parametrize("canvases", ["one", "all"])
@pytest.mark.parametrize("causal_weight", [0.0, 1.0])
@pytest.mark.parametrize("length", [0, 1, 8])
def test_rows_without_an_answer_add_nothing_to_a_step_that_has_one(model, canvases, causal_weight, length):
    lengths = torch.full((3,), length)
    empty = TrainBatch(tokens=BATCH.tokens, prompt_len=lengths, length=lengths)
    loss = make(canvases=canvases, causal_weight=causal_weight, causal_scope="answer")
    counts = [loss.total_counts(batch, SEEDS) for batch in (BATCH, empty)]
    totals = {name: counts[0][name] + counts[1][name] for name in counts[0]}
    assert totals["decoder"] == counts[0]["decoder"]
    terms = loss(model, empty, seeds=SEEDS)
    assert all(not values.any() for values in (*terms.sums.values(), *terms.counts.values()))
    gradients = torch.autograd.grad(loss.reduce(terms, totals), model.parameters(), allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in gradients)


def _without(logits: Tensor, token: int) -> Tensor:
    return logits.masked_fill(torch.arange(VOCAB) == token, -torch.inf)


@pytest.mark.parametrize("accelerated", [False, True])
def test_canvases_that_are_frozen_as_a_whole_are_not_denoised(calls, accelerated):
    torch.manual_seed(2)
    model = DiffusionGemma(CONFIG, dtype=torch.float64)
    frozen = torch.zeros(3, 20, dtype=torch.bool)
    frozen[0, 3:9] = frozen[0, 15:] = frozen[2] = True  # a first canvas, a last one without its fill, and a whole row
    lengths = {"prompt_len": torch.tensor([3, 0, 2]), "length": torch.tensor([20, 6, 20])}
    batch = replace(BATCH, frozen=frozen, documents=(torch.arange(20) > 11).long().expand(3, -1), **lengths)
    whole = replace(batch)
    object.__setattr__(whole, "host_frozen", None)  # as if the batch were made on a GPU: all canvases are denoised
    loss, found = make(canvases="all", holes_prob=0.5, masks=MaskNoise(VOCAB, mask_token_id=MASK)), []
    with accelerate_training(model) if accelerated else nullcontext():
        for rows in (batch, whole):
            terms = loss(model, rows, seeds=SEEDS)
            found.append((terms, torch.autograd.grad(loss.reduce(terms), list(model.parameters()))))
    assert [call["z"].shape[1] for call in calls] == [2, 2, 3, 3]
    (terms, gradients), (expected, expected_gradients) = found
    assert terms.counts["decoder"].tolist() == expected.counts["decoder"].tolist()
    torch.testing.assert_close((terms.sums, gradients), (expected.sums, expected_gradients), rtol=1e-11, atol=1e-13)
    assert loss.total_counts(batch, SEEDS) == loss.total_counts(whole, SEEDS)
