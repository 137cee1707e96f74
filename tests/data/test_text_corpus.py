"""The corpus of `dgemma/text`: how books are cleaned, split and held out, and how texts are written by rule."""

import hashlib
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "examples" / "text_corpus" / "prepare.py"
HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"  # SHA-256 of "hello", as published


sys.path.append(str(PATH.parent))  # the scripts import their neighbours
corpus, dialogues, everyday, stories = map(importlib.import_module, ("prepare", "dialogues", "everyday", "stories"))


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    texts = [dialogues.as_text(dialogues.write_dialogue(number)) for number in range(300)]
    template = PATH.with_name("chat_template.jinja").read_text("utf-8")
    out = tmp_path_factory.mktemp("tokenizer")
    return corpus.train_tokenizer(texts, 600, out, markers=corpus.MARKERS, chat_template=template)


def test_chapters_are_separated_at_headings_and_unwrapped():
    lines = [
        "CHAPTER I. Down",
        "",
        "It was _very_",
        "late.  Nobody",
        "came.",
        "",
        '"No," said he.',
        "",
        "II",
        "",
        "Next day.",
    ]
    texts = [d.text for d in corpus.by_chapter("work", lines)]
    assert texts == ["", 'It was very late. Nobody came.\n\n"No," said he.', "Next day."]


def test_sentences_are_never_held_out(tmp_path):
    documents = [corpus.Document(name=f"document {n}", text=f"Text {n}.") for n in range(200)]
    for package, is_empty in ((corpus.WORDNET, True), (corpus.BIBLE, False)):
        corpus.write_corpus(tmp_path, [(package, documents)], {})
        assert ((tmp_path / "test.txt").read_text() == "") == is_empty


def test_the_part_of_a_document_follows_from_its_name():
    parts = [corpus.part_of(f"document {n}") for n in range(10_000)]
    assert parts == [corpus.part_of(f"document {n}") for n in range(10_000)]
    for part in ("validation", "test"):
        assert 190 <= parts.count(part) <= 310  # 250 expected, plus or minus four standard deviations


@pytest.fixture
def package():
    leave_a_file = (sys.executable, "-c", "open('p.tgz', 'wb').write(b'hello')")
    return corpus.Package(name="p", client=leave_a_file, file="p.tgz", sha256=HELLO, licence="CC0", copies=1)


def test_a_package_that_changed_is_refused(package, tmp_path):
    (tmp_path / "p.tgz").write_bytes(b"other")
    with pytest.raises(SystemExit, match="must have SHA-256 2cf24dba"):
        corpus.fetch(package, tmp_path)


def test_a_story_follows_from_its_number_and_seed():
    """On every machine and version of Python. A change of the phrases changes the hash."""
    first = "".join(map(stories.write_story, range(300)))
    assert hashlib.sha256(first.encode()).hexdigest().startswith("2c56f7b07adf7a44ea157382ee9b48f755fe87950f080458")
    assert (
        len({stories.write_story(n) for n in range(200)} | {stories.write_story(n, seed=1) for n in range(200)}) == 400
    )


def rendered(source):
    """Return texts of all kinds, but no JSON."""
    if source == "stories":
        return [stories.write_story(number, seed=2) for number in range(600)]
    if source == "everyday":
        return [everyday.write_everyday(number, seed=3, kind=kind) for kind in everyday.KINDS for number in range(60)]
    kinds = set(dialogues.KINDS) - {"extraction", "tool"}
    written = (dialogues.write_dialogue(number, seed=10, kind=kind) for kind in kinds for number in range(150))
    return [message["content"] for dialogue in written for message in dialogue.messages]


@pytest.mark.parametrize("source", ["stories", "everyday", "dialogues"])
def test_texts_contain_no_template_syntax(source):
    """Nor two full stops, a space before a comma, a word twice, or "a apple"."""
    marks = re.compile(r"[\[\]{}|]|  | [,.!?]|[,.!?] ?[,.]|\b[Aa] [aeio](?!ne\b)|\b([a-z]+) \1\b")
    allowed = re.compile(r"\b(had had|that that|her her)\b|P\.S\.|\([^)]*\)|\.\.\.")
    for text in rendered(source):
        assert not marks.search(allowed.sub("-", text)), text


def test_texts_follow_from_number_and_seed():
    assert everyday.write_everyday(3) == everyday.write_everyday(3) != everyday.write_everyday(3, seed=1)
    assert dialogues.write_dialogue(3) == dialogues.write_dialogue(3) != dialogues.write_dialogue(3, seed=1)
    assert len({everyday.write_everyday(number) for number in range(200)}) > 195  # short facts may repeat


def test_sums_of_dialogues_are_right():
    signs = {"plus": "+", "minus": "-", "times": "*", "x": "*", "divided by": "//", "/": "//", "+": "+", "-": "-"}
    asked = re.compile(r"What is (\d+) (plus|minus|times|divided by|[-+/x]) (\d+)\?")
    checked = 0
    for number in range(400):
        messages = dialogues.write_dialogue(number, seed=4, kind="arithmetic").messages
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            if found := asked.fullmatch(question["content"]):
                value = eval(f"{found[1]} {signs[found[2]]} {found[3]}")
                assert re.findall(r"\d+", answer["content"])[-1] == str(value)
                checked += 1
    assert checked > 50


def test_values_of_an_extraction_occur_in_its_sentence():
    for number in range(400):
        question, answer = dialogues.write_dialogue(number, seed=5, kind="extraction").messages
        for key, value in json.loads(answer["content"]).items():
            assert key in question["content"]
            for part in value if isinstance(value, list) else [value]:
                assert str(part).lower() in question["content"].lower()


def test_records_have_values_that_are_in_no_list():
    """Else a model answers with a value that it knows, instead of the one in the text."""
    listed = {name for names in everyday.phrases["people"]["name"].values() for name in names.split(", ")}
    answers = (dialogues.write_dialogue(n, seed=5, kind="extraction").messages[1]["content"] for n in range(1500))
    keys = ("owner", "sender", "seller", "guest", "traveller")
    names = [value for answer in answers for key, value in json.loads(answer).items() if key in keys]
    new = [name for name in names if name not in listed]
    assert len(set(new)) > 0.9 * len(new) > 0.25 * len(names) > 10


def test_arguments_of_tool_calls_occur_in_the_request_and_their_names_in_the_declaration():
    for number in range(400):
        dialogue = dialogues.write_dialogue(number, seed=6, kind="tool")
        declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in dialogue.tools}
        for question, answer in zip(dialogue.messages, dialogue.messages[1:], strict=False):
            for call in answer.get("tool_calls", ()):
                function = call["function"]
                assert list(function["arguments"]) == declared[function["name"]]["required"]
                for value in function["arguments"].values():
                    written = str(value).lower().replace("*", "times").replace("+", "plus").replace("-", "minus")
                    assert any(text in question["content"].lower() for text in (str(value).lower(), written))


def test_answers_about_a_paragraph_take_names_and_numbers_from_it():
    starts = "A About At Because Between By For From In It On Of The To Together Its There They That You He She"
    starts += " Room Near Platform Gate Floor Table Line Number"
    for number in range(400):
        question, answer, *_ = dialogues.write_dialogue(number, seed=7, kind="reading").messages
        if answer["content"] not in dialogues.phrases["not_in_text"]:
            for word in re.findall(r"\b[A-Z][a-z]+\b|\d+", answer["content"]):
                assert word in starts.split() or word.lower() in question["content"].lower(), (question, answer)


def test_the_chat_template_renders_dialogues_as_the_corpus_does(chat_tokenizer):
    for number in range(150):
        dialogue = dialogues.write_dialogue(number, seed=7)
        own = [at for at, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
        for at, (prompt, answer) in zip(own, dialogues.turns(dialogue), strict=True):
            found = chat_tokenizer.chat_turn(dialogue.messages[: at + 1], tools=dialogue.tools or None)
            assert found == (chat_tokenizer.encode(prompt), chat_tokenizer.encode(answer, bos=False))


def test_answers_continue_their_prompts():
    ((prompt, answer),) = corpus.answers_of(5, "everyday")
    assert prompt + answer == corpus.write_everyday(5)
    assert answer.startswith(" ")
    for prompt, answer in corpus.answers_of(5, "dialogues"):
        assert prompt.endswith("<|turn>model\n")
        assert answer.endswith("<turn|>")


@pytest.fixture
def answer_source(tmp_path, chat_tokenizer):
    """Make an `AnswerSource` of pairs of prompts and answers."""
    from dgemma.data.text import Document, TokenFile

    spec = importlib.util.spec_from_file_location("train_text", PATH.parents[1] / "08_train_text.py")
    example = importlib.util.module_from_spec(spec)
    sys.modules["train_text"] = example  # dataclasses look their module up
    spec.loader.exec_module(example)

    def make(pairs, **sizes):
        file = TokenFile.write((Document(answer, prompt) for prompt, answer in pairs), chat_tokenizer, tmp_path)
        return example.AnswerSource(file=file, num_canvases=8, **sizes)

    return make


def test_steps_are_of_the_sources_in_their_shares_and_no_source_misses_one_of_its_own(answer_source):
    sources = (lambda *asked: ("text", *asked), lambda *asked: asked)
    in_turn = sys.modules["train_text"].InTurn(sources=sources, shares=(1, 2))
    rows = range(3)
    expected = [("text", 0, rows), (0, rows), (1, rows), ("text", 1, rows), (2, rows), (3, rows)]
    assert [in_turn(step, rows) for step in range(6)] == expected


def test_a_row_has_at_most_five_open_canvases_and_two_epochs_open_a_whole_answer(answer_source):
    source = answer_source([("What is 1?", " It is 1, and 1, and 1." * 9)], canvas_len=4, batch_size=1)
    first, last = (set((~source(step, range(1)).frozen[0]).nonzero().flatten().tolist()) for step in range(2))
    assert len(first) == len(last) == 5 * 4
    assert sorted(first | last) == list(range(min(first), 33))
    assert (min(first) - 1) % 4 == 0


def test_the_canvases_of_an_answer_begin_where_its_prompt_ends(answer_source, chat_tokenizer):
    pairs = [(f"What is {n} and 1?" * (1 + n % 3), f" It is {n + 1}.") for n in range(30)]
    source = answer_source(pairs, canvas_len=16, batch_size=4)
    seen = []
    for step in range(-(-source.num_rows // 4)):
        batch = source(step, range(4))
        assert ((~batch.frozen).sum(1) <= 5 * 16).all()
        for row in range(min(4, source.num_rows - 4 * step)):
            opened = (~batch.frozen[row]).nonzero().flatten().tolist()
            starts = [
                at for at in opened if at - 1 not in opened or batch.documents[row, at] != batch.documents[row, at - 1]
            ]
            assert all((at - 1) % 16 == 0 for at in starts)
            for at in starts:
                same = (batch.documents[row] == batch.documents[row, at]).nonzero().flatten().tolist()
                prompt, answer = batch.tokens[row, same[0] : at], batch.tokens[row, at : same[-1] + 1]
                seen.append((chat_tokenizer.decode(prompt), chat_tokenizer.decode(answer)))
    assert sorted(seen) == sorted(pairs)
