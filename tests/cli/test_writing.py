"""generate, chat, infill and edit print exactly the output of the library."""

import json
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import dgemma
from dgemma.cli import writing

QUICK = ("-n", "1", "--steps", "2")  # one canvas


@pytest.fixture(scope="module")
def model(checkpoint):
    return dgemma.DiffusionGemma.from_pretrained(checkpoint)


def write(model, ids, **options):
    """Return the new tokens that the library writes."""
    return dgemma.generate(model, torch.tensor([ids]), max_new_tokens=1, steps=2, **options).new_tokens[0].tolist()


def test_generate_prints_prompt_and_continuation_and_nothing_else(command, checkpoint, model):
    ran = command("generate", "-m", checkpoint, *QUICK, "Once", "upon")
    tokenizer = dgemma.ByteTokenizer()
    note = "-n 1 is rounded up to 32, a multiple of the canvas length 32.\n"
    assert ran == (0, "Once upon" + tokenizer.decode(write(model, tokenizer.encode("Once upon"))) + "\n", note)
    assert command("generate", "-m", checkpoint, "-n", "32", "--steps", "1", "Once").err == ""
    for pattern, err in (("[a-z]", ""), ("[a-z]{2}", note)):  # one token fits into -n 1, two do not
        assert command("generate", "-m", checkpoint, *QUICK, "--regex", pattern, "Once").err == err
    assert "\x1b[" not in ran.out


def test_every_sampling_option_reaches_the_library(command, checkpoint, model):
    words = "-n 33 --noise mask --sampler confidence:quota=cosine --temperature 0.5 --top-k 9 --top-p 0.9 --steps 3"
    found = json.loads(command("generate", "-m", checkpoint, *words.split(), "--seed", "7", "--json", "a").out)
    out = dgemma.generate(
        model,
        torch.tensor([dgemma.ByteTokenizer().encode("a")]),
        max_new_tokens=33,  # two canvases
        steps=3,
        noise=dgemma.MaskNoise(384, mask_token_id=4),
        sampler=dgemma.Confidence(quota="cosine"),
        temperature=0.5,
        top_k=9,
        top_p=0.9,
        seed=7,
    )
    assert found["tokens"] == out.new_tokens[0].tolist()
    assert found["text"] == dgemma.ByteTokenizer().decode(found["tokens"])
    assert (found["prompt"], found["seed"], found["steps"], found["tokens_per_forward"]) == ("a", 7, 6, 10.667)


def test_a_file_of_prompts_gives_a_file_of_results_that_the_command_completes(command, checkpoint, model, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "run.jsonl"
    lines = ["Once", {"prompt": "It was", "id": 7}, {"messages": [{"role": "user", "content": "hi"}]}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("generate", "-m", checkpoint, *QUICK, "--seed", "3", "--batch-size", "2", "--input", prompts, "--out", out)
    note = f"-n 1 is rounded up to 32, a multiple of the canvas length 32.\n{out} holds 3 results.\n"
    assert command(*words) == (0, "", note)
    tokenizer = dgemma.ByteTokenizer()
    rows = [tokenizer.encode("Once"), tokenizer.encode("It was"), tokenizer.chat("hi")]
    found = sorted((json.loads(line) for line in out.read_text().splitlines()[1:]), key=lambda line: line["index"])
    for at, (line, row) in enumerate(zip(found, rows, strict=True)):
        want = write(model, row, seed=3 + at)
        assert line["new_tokens"] == want
        assert (line["text"], line["seed"], line["steps"]) == (tokenizer.decode(want), 3 + at, [2])
    assert [line.get("id") for line in found] == [None, 7, None]
    whole = out.read_bytes()
    out.write_bytes(whole[:-5])
    assert command(*words, "--quiet") == (0, "", "")
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())
    assert "instead of 3" in command(*words, "--seed", "4").err
    prompts.write_text('"Once"\n\n{"text": "It was"}\n')
    assert ":3 must be a prompt" in command(*words[:-1], tmp_path / "other.jsonl").err
    assert "must be used together" in command("generate", "--input", prompts).err


def test_ctrl_c_keeps_finished_results_and_says_that_the_command_continues(command, checkpoint, monkeypatch, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "run.jsonl"
    prompts.write_text('"Once"\n"It was"\n')
    generate_many = writing.generate_many

    def press_ctrl_c(*args, **options):
        yield next(generate_many(*args, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "generate_many", press_ctrl_c)
    words = ("generate", "-m", checkpoint, *QUICK, "--batch-size", "1", "--input", prompts, "--out", out, "--quiet")
    stopped = f"\nFinished results are in {out}. The same command continues.\n\nStopped.\n"
    assert command(*words) == (130, "", stopped)
    assert len(out.read_text().splitlines()) == 2  # the settings and one result
    monkeypatch.undo()
    assert command(*words) == (0, "", "")
    assert len(out.read_text().splitlines()) == 3


def test_written_tokens_end_with_the_stop_token():
    """A padding token that the model wrote before the stop token is kept, because it is in the cache."""
    writer = SimpleNamespace(denoiser=SimpleNamespace(generation=dgemma.GenerationDefaults()))
    out = SimpleNamespace(new_tokens=torch.tensor([[200, 0, 106, 0, 0]]))
    assert writing._written(out, writer) == [200, 0, 106]


@pytest.mark.parametrize("words", [(), ("-",)], ids=["nothing", "dash"])
def test_the_prompt_is_read_from_standard_input(command, checkpoint, words):
    piped = command("generate", "-m", checkpoint, *QUICK, *words, stdin="Où?\n".encode())
    assert piped == command("generate", "-m", checkpoint, *QUICK, "Où?")


def test_generate_with_the_chat_template_prints_only_the_answer(command, checkpoint, model):
    tokenizer = dgemma.ByteTokenizer()
    ran = command("generate", "-m", checkpoint, *QUICK, "--chat", "Who?")
    assert ran.out == tokenizer.decode(write(model, tokenizer.chat("Who?"))) + "\n"


def test_chat_prints_one_json_object_per_turn_until_an_empty_line(command, checkpoint, model):
    ran = command("chat", "-m", checkpoint, *QUICK, "--json", stdin=b"Who?\nWhy?\n\nWhen?\n")
    first, second = map(json.loads, ran.out.splitlines())
    tokenizer = dgemma.ByteTokenizer()
    messages = [{"role": "user", "content": "Who?"}]
    for seed, (found, next_question) in enumerate(((first, "Why?"), (second, ""))):
        assert found["text"] == tokenizer.reply(write(model, tokenizer.chat(messages), seed=seed)).answer
        assert found["seed"] == seed, "each turn has its own noise"
        messages += [{"role": "assistant", "content": found["text"]}, {"role": "user", "content": next_question}]


def test_earlier_turns_are_not_read_again(command, checkpoint, model, monkeypatch):
    """Without a template, each turn continues the previous text, so the cache can always be reused."""
    read = []

    def watched(denoiser, prompt, **options):
        read.append((prompt.tolist()[0], options["cache"] is not None))
        return dgemma.generate(denoiser, prompt, **options)

    monkeypatch.setattr(writing, "generate", watched)
    monkeypatch.setattr(dgemma.ByteTokenizer, "has_chat_template", False)
    ran = command("chat", "-m", checkpoint, *QUICK, "--json", stdin=b"ab\ncd\n")
    tokenizer = dgemma.ByteTokenizer()
    start, more = tokenizer.encode("ab"), tokenizer.encode("\ncd", bos=False)  # a new line separates the turns
    assert read == [(start, False), (more, True)]
    assert "continues your text" in ran.err
    written = write(model, start)
    whole = write(model, [*start, *written, *more], seed=1)
    assert [json.loads(line)["text"] for line in ran.out.splitlines()] == list(map(tokenizer.decode, (written, whole)))


def test_infill_writes_a_token_for_every_underscore_and_keeps_the_rest(command, checkpoint):
    found = json.loads(command("infill", "-m", checkpoint, "--steps", "2", "--json", "The ___ sat_on a __.").out)
    original = dgemma.ByteTokenizer().encode("The ___ sat_on a __.")
    holes = [5, 6, 7, 18, 19]  # a single underscore is itself
    assert [i for i, value in enumerate(found["log_probs"]) if value != 0] == holes
    kept = [i for i in range(len(original)) if i not in holes]
    assert [found["tokens"][i] for i in kept] == [original[i] for i in kept]
    assert found["text"].startswith("The ")
    assert " sat_on a " in found["text"]


def test_a_hole_of_any_length_gives_the_text_that_is_most_likely_from_left_to_right(command, checkpoint):
    words = ("infill", "-m", checkpoint, "--steps", "2", "--json")
    found = json.loads(command(*words, "The [...] sat.").out)["tokens"]
    # Holes of one underscore do not exist, so the shortest is left out.
    texts = [json.loads(command(*words, f"The {'_' * length} sat.").out)["tokens"] for length in writing._LENGTHS[1:]]
    model = dgemma.DiffusionGemma.from_pretrained(checkpoint)

    def loss(tokens):
        row = torch.tensor([tokens])
        logits = model.causal_logits(row)[0, :-1].detach()
        return float(torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum"))

    best = min(loss(tokens) for tokens in texts)
    assert loss(found) <= best + 1e-3


def test_a_hole_of_any_length_has_a_length_that_the_constraint_allows(command, checkpoint):
    words = ("infill", "-m", checkpoint, "--steps", "1")
    found = command(*words, "--choice", "small", "--choice", "tiny", "The [...] sat.").out
    assert found in ("The small sat.\n", "The tiny sat.\n")
    assert "no text has" in command(*words, "--regex", "[a-z]{13}", "The [...] sat.").err


def test_a_prompt_that_ends_with_a_space_is_noted(command, checkpoint):
    assert "ends with a space" in command("generate", "-m", checkpoint, *QUICK, "Once ").err
    assert "ends with a space" not in command("generate", "-m", checkpoint, *QUICK, "Once").err


@pytest.mark.parametrize("words", [("infill", "The __ sat."), ("edit", "The cat sat.")], ids=["infill", "edit"])
def test_positions_after_the_text_are_filled_with_end_tokens(command, checkpoint, monkeypatch, words):
    """The texts are shorter than the canvas of 32. Free positions after the text would cost extra steps."""
    tails = []
    library = getattr(writing, words[0])

    def watched(*args, tail_token_id, **options):
        tails.append(tail_token_id)
        return library(*args, tail_token_id=tail_token_id, **options)

    monkeypatch.setattr(writing, words[0], watched)
    assert command(words[0], "-m", checkpoint, "--steps", "1", words[1]).code == 0
    assert tails == [dgemma.ByteTokenizer.eos_token_id]


def test_edit_does_not_change_the_words_of_keep(command, checkpoint):
    text = "an old man, old as stone"
    ran = command(
        "edit",
        "-m",
        checkpoint,
        *("--steps", "2", "--level", "1", "--json"),
        *("--keep", "old", "--keep", "old m"),
        text,
    )
    found, original = json.loads(ran.out)["tokens"], dgemma.ByteTokenizer().encode(text)
    kept = [0, 4, 5, 6, 7, 8, 13, 14, 15]
    assert [found[i] for i in kept] == [original[i] for i in kept]
    # Each of the other 16 letters stays by chance with probability 1/384.
    assert sum(a == b for a, b in zip(found, original, strict=True)) < len(kept) + 4


def test_a_page_and_an_animation_are_written_without_a_display(command, checkpoint, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.delenv("DISPLAY", raising=False)
    page, gif = tmp_path / "run.html", tmp_path / "run.gif"
    ran = command("generate", "-m", checkpoint, *QUICK, "--html", page, "--gif", gif, "--json", "Once")
    assert page.read_text().startswith("<!")
    assert gif.read_bytes().startswith(b"GIF8")
    assert json.loads(ran.out)["prompt"] == "Once"  # standard error names the files
    assert ran.err.endswith(f"\nWrote {page}.\nWrote {gif}.\n")


def test_a_text_of_several_canvases_has_a_page_for_each(command, checkpoint, tmp_path):
    page, text = tmp_path / "run.html", "__" + "x" * 40 + "__."
    for words in (("infill", text), ("edit", "--level", "1", text)):
        ran = command(*words, "-m", checkpoint, "--steps", "1", "--html", page)
        assert ran.err == f"Wrote {page}.\nWrote {tmp_path / 'run-2.html'}.\n"
        assert all(path.read_text().startswith("<!") for path in tmp_path.iterdir())


def test_a_gif_without_matplotlib_is_refused_before_generating(command, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = command("generate", "-m", checkpoint, "--gif", tmp_path / "run.gif", "Once")
    assert ran.code == 2
    assert '--gif needs Pillow and matplotlib: pip install -e ".[plots]".' in ran.err
    assert not list(tmp_path.iterdir())


def test_images_of_generate_and_chat_are_those_of_the_library(command, tmp_path):
    model = dgemma.DiffusionGemma(dgemma.presets.tiny(vision=True).replace(vocab_size=384))
    model.save_pretrained(tmp_path / "model")
    tokenizer = dgemma.ByteTokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    pixels = torch.randint(256, (20, 30, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    images = dgemma.ImageProcessor.from_pretrained(tmp_path / "model")([pixels])
    options = ("-m", str(tmp_path / "model"), *QUICK, "--json", "--image", str(tmp_path / "photo.png"))
    prompt = tokenizer.place_images(tokenizer.encode("<|image|>What?"), images)
    found = json.loads(command("generate", *options, "What?").out)
    assert found["tokens"] == [token for token in write(model, prompt, images=images) if token != 0]
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    first = json.loads(command("generate", *options, "--chat", "What?").out)["text"]
    answers = [json.loads(line)["text"] for line in command("chat", *options, stdin=b"What?\nWhy?\n").out.splitlines()]
    new = write(model, tokenizer.chat(turn, images=images), images=images)
    assert first == tokenizer.decode([token for token in new if token != 0])
    assert answers[0] == tokenizer.reply(new).answer
    turns = [*turn, {"role": "assistant", "content": answers[0]}, {"role": "user", "content": "Why?"}]
    new = write(model, tokenizer.chat(turns, images=images), images=images, seed=1)
    assert answers[1:] == [tokenizer.reply(new).answer]
    images = dgemma.ImageProcessor.from_pretrained(tmp_path / "model", max_soft_tokens=70)([pixels])
    prompt = tokenizer.place_images(tokenizer.encode("<|image|>What?"), images)
    found = json.loads(command("generate", *options, "--image-tokens", "70", "What?").out)
    assert found["tokens"] == [token for token in write(model, prompt, images=images) if token != 0]
    refused = command("generate", *options, "--image", str(tmp_path / "absent.png"), "What?")
    assert refused.code == 2
    assert "absent.png" in refused.err
    Image.new("1", (10_000, 10_000)).save(tmp_path / "large.png")
    with warnings.catch_warnings():  # Pillow's warning would be a second sentence
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        refused = command("generate", *options, "--image", str(tmp_path / "large.png"), "What?")
    assert "large.png must have 1 to 67,108,864 pixels, got 10000 × 10000. Resize it." in refused.err
