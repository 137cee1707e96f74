"""The real lm-evaluation-harness on local data: its numbers are those of `generate` and of the likelihood."""

import functools
import json
import math
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch

import dgemma
from dgemma.sampling.named import describe_noise

pytestmark = pytest.mark.slow  # importing the harness takes seconds

QUESTIONS = [
    {"question": "ab", "choices": ["cd", "xyz"], "answer": 0},
    {"question": "1 + 1 =", "choices": ["2", "three"], "answer": 1},
    {"question": "a longer question?", "choices": ["yes", "no"], "answer": 0},
]
SPLIT = "test_split: test\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: '{path}'}}}}\n"
TASKS = {
    "write": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["b"], max_gen_toks: 6}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "choose": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with random weights, confident predictions, and a config that names mask noise."""
    pytest.importorskip("lm_eval")
    torch.manual_seed(0)
    config = dgemma.presets.tiny().replace(
        vocab_size=384,
        canvas_length=4,
        num_hidden_layers=2,
        layer_types=("sliding_attention", "full_attention"),
        num_experts=4,
    )
    model = dgemma.DiffusionGemma(config)
    with torch.no_grad():
        model.norm.weight.mul_(8)
    noise = describe_noise(dgemma.MaskNoise(384, mask_token_id=4))
    model.generation = dgemma.GenerationDefaults(max_denoising_steps=3, max_new_tokens=8, noise=noise)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    dgemma.ByteTokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return dgemma.DiffusionGemma.from_pretrained(folder)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: local_{name}\n" + SPLIT.format(path=data) + text)
    return folder


def DiffusionLM(*args, **options):
    from dgemma.eval import harness

    return harness.DiffusionLM(*args, **options)


def run(lm, tasks, name, **options):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(lm, tasks=[f"local_{name}"], task_manager=manager, bootstrap_iters=0, **options)


def answers(results, name):
    return [sample["resps"] for sample in results["samples"][f"local_{name}"]]


def test_answers_are_those_of_generate_with_a_seed_per_request(folder, model, tasks, tmp_path):
    lm = DiffusionLM(folder, sampler="threshold:tau=0.8;greedy=True", seed=5, details=tmp_path / "details.jsonl")
    results = run(lm, tasks, "write")
    tokenizer = dgemma.ByteTokenizer()
    sampler = dgemma.Threshold(tau=0.8, greedy=True)
    for index, (question, ((text,),)) in enumerate(zip(QUESTIONS, answers(results, "write"), strict=True)):
        prompt = torch.tensor([tokenizer.encode(question["question"])])
        out = dgemma.generate(model, prompt, max_new_tokens=6, sampler=sampler, seed=[5 + index])
        assert text == tokenizer.decode(out.new_tokens[0, :6]).partition("b")[0]
    protocol = results["config"]["dgemma"]
    assert protocol["sampler"] == "Threshold(tau=0.8, greedy=True)"
    assert protocol["steps"] == 3
    assert protocol["seed"] == 5
    assert protocol["thinking"] is False
    assert protocol["revision"].startswith("weights:")
    lines = [json.loads(line) for line in (tmp_path / "details.jsonl").read_text().splitlines()]
    forwards, tokens = sum(sum(line["steps"]) for line in lines), sum(line["tokens"] for line in lines)
    assert protocol["measured"]["tokens_per_forward"] == pytest.approx(tokens / forwards)
    assert [line["seed"] for line in lines] == [5, 6, 7]


def causal_nats(model, context, continuation):
    row = torch.tensor([context + continuation])
    log_probs = model.causal_logits(row)[0, :-1].double().log_softmax(-1)
    return log_probs[torch.arange(len(row[0]) - 1), row[0, 1:]][len(context) - 1 :].sum().item()


@torch.no_grad()
def test_causal_scores_are_sums_of_next_token_log_probabilities(folder, model, tasks):
    results = run(DiffusionLM(folder, likelihood="causal", batch_size=2, check_greedy=True), tasks, "choose")
    tokenizer, right = dgemma.ByteTokenizer(), 0
    for question, scored in zip(QUESTIONS, answers(results, "choose"), strict=True):
        context = tokenizer.encode(question["question"])
        expected = [causal_nats(model, context, tokenizer.encode(f" {c}", bos=False)) for c in question["choices"]]
        assert [score[0][0] for score in scored] == pytest.approx(expected, abs=1e-3)
        right += expected.index(max(expected)) == question["answer"]
    assert results["results"]["local_choose"]["acc,none"] == pytest.approx(right / 3)


def exact_bound(model, context, x):
    """Return minus the bound of tokens x, a sum over all sets of masked tokens. The rest of the canvas is masks."""
    total, cache = 0.0, model.encode(torch.tensor([context]))
    for bits in range(1, 2 ** len(x)):
        masked = [bool(bits >> i & 1) for i in range(len(x))]
        canvas = [4 if hidden else token for hidden, token in zip(masked, x, strict=True)] + [4] * (4 - len(x))
        logits = model.denoise(torch.tensor([canvas]), cache).logits[0].double()
        logits[:, 4] = -torch.inf
        cost = sum(-logits[i].log_softmax(-1)[x[i]].item() for i in range(len(x)) if masked[i])
        n = sum(masked)
        total -= cost * math.factorial(n - 1) * math.factorial(len(x) - n) / math.factorial(len(x))
    return total


@torch.no_grad()
def test_bounds_agree_with_the_sum_over_all_sets_of_masks(folder, model):
    from dgemma.eval.harness import Pair

    lm, tokenizer = DiffusionLM(folder, num_samples=128, likelihood="both", seed=1), dgemma.ByteTokenizer()
    pairs = [Pair(tokenizer.encode("ab"), tokenizer.encode(text, bos=False)) for text in ("c", "cde")]
    scores = lm._score(pairs, show=False)
    for pair, score in zip(pairs, scores, strict=True):
        assert abs(score.bound.value - exact_bound(model, *pair)) < 2.5 * score.bound.error + 1e-3
        assert score.causal == pytest.approx(causal_nats(model, *pair), abs=1e-3)
    alone = DiffusionLM(folder, num_samples=128, seed=1, batch_size=3)._score(pairs[1:], show=False)[0]
    assert alone.bound.value == pytest.approx(scores[1].bound.value, abs=1e-3)


@torch.no_grad()
def test_rolling_likelihood_scores_every_token_once(folder, model, tasks):
    lm = DiffusionLM(folder, likelihood="causal", max_length=8)
    results = run(lm, tasks, "rolling")
    tokenizer, bits, num_bytes = dgemma.ByteTokenizer(), 0.0, 0
    for question in QUESTIONS:
        tokens = tokenizer.encode(question["question"], bos=False)
        num_bytes += len(tokens)
        for start in range(0, len(tokens), 8):  # the last window has as much context as fits
            end = min(start + 8, len(tokens))
            context = [2] if start == 0 else tokens[end - 9 : start]
            bits -= causal_nats(model, context, tokens[start:end]) / math.log(2)
    assert results["results"]["local_rolling"]["bits_per_byte,none"] == pytest.approx(bits / num_bytes, abs=1e-3)


def test_chats_are_rendered_by_the_checkpoints_template(folder):
    lm, tokenizer = DiffusionLM(folder, thinking=True), dgemma.ByteTokenizer()
    chat = [{"role": "user", "content": "2 + 2?"}]
    assert lm.tok_encode(lm.apply_chat_template(chat)) == tokenizer.chat(chat, thinking=True)
    open_turn = lm.apply_chat_template(
        [*chat, {"role": "assistant", "content": "The sum"}], add_generation_prompt=False
    )
    assert open_turn == lm.apply_chat_template(chat) + "The sum"
    assert "…" in lm.chat_template(True)


def test_wrong_arguments_are_named(folder):
    with pytest.raises(ValueError, match="sampler must be one of ancestral"):
        DiffusionLM(folder, sampler="greedy")
    request = SimpleNamespace(args=("ab", {"max_gen_toks": 10**9}))
    with pytest.raises(ValueError, match="max_gen_toks must leave room for a prompt"):
        DiffusionLM(folder).generate_until([request])


def test_a_file_of_details_that_cannot_be_written_is_refused_at_the_start(folder, tmp_path):
    with pytest.raises(OSError, match=r"details\.jsonl cannot be written: its folder does not exist"):
        DiffusionLM(folder, details=tmp_path / "missing" / "details.jsonl")
    with pytest.raises(OSError, match="could not be written: Is a directory"):
        DiffusionLM(folder, details=tmp_path)


def test_details_of_an_earlier_run_stay_until_there_are_new_ones(folder, tmp_path):
    earlier, new = tmp_path / "earlier.jsonl", tmp_path / "new.jsonl"
    earlier.write_text("{}\n")
    for path in (earlier, new):
        DiffusionLM(folder, details=path)
    assert earlier.read_text() == "{}\n"
    assert list(tmp_path.iterdir()) == [earlier]


@pytest.mark.parametrize("likelihood", ["bound", "causal", "both"])
@pytest.mark.parametrize("check_greedy", [False, True])
def test_an_empty_continuation_is_certain_and_adds_no_measurement(folder, likelihood, check_greedy):
    lm = DiffusionLM(folder, likelihood=likelihood, num_samples=8, check_greedy=check_greedy)
    empty, other = (("ab", ""), [2, 5], []), (("ab", "a"), [2, 5], [6])
    assert lm._loglikelihood_tokens([empty], disable_tqdm=True) == [(0.0, check_greedy)]
    assert lm.measured() == {"requests": 1}
    (_, (score, _)) = lm._loglikelihood_tokens([empty, other], disable_tqdm=True)
    assert score < 0
    alone = DiffusionLM(folder, likelihood=likelihood, num_samples=8, seed=lm.seed)
    alone._loglikelihood_tokens([other], disable_tqdm=True)
    assert lm.measured() == {**alone.measured(), "requests": 3}


def test_the_command_runs_the_harness_and_stores_the_protocol(folder, tasks, tmp_path, monkeypatch, capsys):
    import lm_eval.tasks

    # Without --model the model is dgemma.
    arguments = ["--model_args", f"pretrained={folder},steps=2", "--tasks", "local_write"]
    arguments += ["--include_path", str(tasks), "--output_path", str(tmp_path), "--seed", "7"]
    monkeypatch.setattr(sys, "argv", ["dgemma.eval", *arguments])
    # The harness would read the files of its thousands of tasks first.
    only_ours = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", only_ours)
    runpy.run_module("dgemma.eval", run_name="__main__")
    (path,) = tmp_path.rglob("results_*.json")
    protocol = json.loads(path.read_text())["config"]["dgemma"]
    assert (protocol["steps"], protocol["seed"]) == (2, 7)
    assert "local_write" in capsys.readouterr().out


@pytest.mark.parametrize("model", [["--model", "dummy"], ["--model=dummy"], ["-M", "dummy"], ["--config=run.yaml"]])
def test_the_command_keeps_a_model_that_is_given(model, monkeypatch):
    import lm_eval.__main__

    seen: list[list[str]] = []
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: seen.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["dgemma.eval", *model, "--tasks=dgemma_cloze"])
    runpy.run_module("dgemma.eval", run_name="__main__")
    assert seen[0][:-2] == [*model, "--tasks=dgemma_cloze"]
    assert seen[0][-2] == "--include_path"
