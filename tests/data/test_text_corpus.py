"""The corpus of the `text` checkpoint: what is cut away, what is joined, and who is held out."""

import importlib.util
import io
import struct
import tarfile
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "examples" / "text_corpus" / "prepare.py"


@pytest.fixture(scope="module")
def corpus():
    spec = importlib.util.spec_from_file_location("prepare", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_chapters_are_parted_at_headings_and_unwrapped(corpus):
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


def test_the_bible_loses_its_verse_numbers_and_keeps_its_chapters(corpus):
    verses = "Genesis\n\n\n1:1 In the\nbeginning.\n\n1:2 And the earth.\n\n2:1 Thus.\n"
    files = {f"package/gutenberg/{work}.txt": b"" for work in corpus.NOVELS}
    files["package/gutenberg/bible-kjv.txt"] = f"The Bible\n\n\n\n{verses}".encode()
    found = [d for d in corpus.read_gutenberg(files) if d.name.startswith("bible")]
    assert [d.text for d in found] == ["In the beginning. And the earth.", "Thus."]


def test_strings_of_r_are_read(corpus):
    def text(value: bytes) -> bytes:
        return struct.pack(">Ii", 0x00040009, len(value)) + value  # a CHARSXP, in ASCII

    serialized = b"X\n" + struct.pack(">III", 2, 0x00030500, 0x00020300) + struct.pack(">II", 16, 2)
    assert corpus.r_strings(serialized + text(b"EMMA") + text(b"")) == ["EMMA", ""]


def test_the_part_of_a_document_follows_from_its_name(corpus):
    parts = [corpus.part_of(f"document {n}") for n in range(10_000)]
    assert parts == [corpus.part_of(f"document {n}") for n in range(10_000)]
    for part in ("validation", "test"):
        assert 190 <= parts.count(part) <= 310  # 250 expected, four standard deviations to each side


def test_archives_of_both_kinds_are_opened(corpus):
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:xz") as archive:
        member = tarfile.TarInfo("./usr/share/text")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"hello"))
    data = inner.getvalue()
    header = b"%-16s%-12d%-6d%-6d%-8s%-10d`\n"
    parts = [(b"debian-binary", b"2.0"), (b"data.tar.xz", data)]  # an odd length, so that padding is met
    deb = b"!<arch>\n" + b"".join(
        header % (name, 0, 0, 0, b"100644", len(body)) + body + b"\n" * (len(body) % 2) for name, body in parts
    )
    assert corpus.open_archive(deb) == {"usr/share/text": b"hello"}
    assert corpus.open_archive(data) == {"usr/share/text": b"hello"}


def test_a_package_that_changed_is_refused(corpus, tmp_path):
    package = corpus.Package(name="p", url="https://example.org/p.tgz", sha256="0" * 64, licence="CC0")
    (tmp_path / "p.tgz").write_bytes(b"other")
    with pytest.raises(ValueError, match="must have SHA-256 0000"):
        corpus.fetch(package, tmp_path)
