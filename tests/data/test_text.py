"""Text files become rows without loss. Documents stay separate, and every row is a function of its number."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from dgemma import DiffusionGemma, UniformNoise, presets
from dgemma.checkpoint.tokenizer import ByteTokenizer, Tokenizer
from dgemma.data.corpus import train_tokenizer
from dgemma.data.text import Document, PromptSource, TextSource, TokenFile, permute, read_dataset, read_documents, scan
from dgemma.train.objective import Objective
from dgemma.train.one_pass import run_text_and_canvases

BOS, EOS = 2, 1


@pytest.fixture
def letters(tmp_path):
    """26 documents: "a" once, "b" twice, and so on, so that a token says which document it is from."""
    documents = [Document(chr(97 + n) * (n + 1)) for n in range(26)]
    return TokenFile.write(documents, ByteTokenizer(), tmp_path / "letters")


def source_of(file, **changes):
    return TextSource(**{"file": file, "canvas_len": 8, "num_canvases": 3, "batch_size": 6, **changes})


def test_text_files_are_read_document_by_document(tmp_path):
    (tmp_path / "b.txt").write_text("one\ftwo\n\f  \f\nthree")
    (tmp_path / "a.jsonl").write_text('{"prompt": "2+2", "answer": "4"}\n\n{"text": "plain"}\n')
    assert list(read_documents(tmp_path, separator="\f")) == [
        Document("4", "2+2"),
        Document("plain"),
        Document("one"),
        Document("two\n"),
        Document("\nthree"),
    ]


def test_a_byte_order_mark_is_dropped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "three"}\r\n')
    assert [d.text for d in read_documents(tmp_path)] == ["one\r\ntwo", "three"]  # line ends are kept


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("separator", ["a", "aa", "aab", "abab"])
def test_documents_equal_those_of_str_split(tmp_path, monkeypatch, separator, chunk):
    monkeypatch.setattr("dgemma.data.documents._CHUNK", chunk)
    text = "".join("ab"[n] for n in torch.randint(2, (60,)))
    (tmp_path / "a.txt").write_text(text + "b")
    expected = [piece for piece in (text + "b").split(separator) if piece]
    assert [d.text for d in read_documents(tmp_path / "a.txt", separator=separator)] == expected


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("empty.txt", b"", "must hold text"),
        ("blank.txt", b" \n\n ", "must hold text"),
        ("latin.txt", "café".encode("latin-1"), "latin.txt must be UTF-8"),
        ("list.jsonl", b'["text"]\n', "list.jsonl:1 must be an object"),
        ("number.jsonl", b'{"text": "a"}\n{"prompt": "b", "answer": 3}\n', "number.jsonl:2 must be an object"),
        ("broken.jsonl", b'{"text": \n', "broken.jsonl:1 must be JSON, got '{\"text\":': "),
        ("odd.jsonl", b'{"text": "\\ud800abc"}\n', "half of a surrogate pair"),
    ],
)
def test_a_file_that_is_not_text_is_refused_with_file_and_byte(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        list(read_documents(tmp_path / name))


def test_missing_files_and_empty_folders_are_named(tmp_path):
    for path in (tmp_path, tmp_path / "nothing.txt"):
        with pytest.raises(FileNotFoundError, match=rf"{path} must be a file, or a folder of"):
            list(read_documents(path))
    with pytest.raises(FileNotFoundError, match=r"TokenFile\.write"):
        TokenFile.open(tmp_path)
    with pytest.raises(ValueError, match="at least one"):
        TokenFile.write([], ByteTokenizer(), tmp_path / "none")
    with pytest.raises(ValueError, match=r"must be Documents, got 'a text'\. Pass .* Document\(text\)"):
        TokenFile.write(["a text"], ByteTokenizer(), tmp_path / "none")


def test_token_files_hold_what_was_written(tmp_path):
    tokenizer = ByteTokenizer()
    documents = [Document("é", "ask"), Document("long " * 50)]
    TokenFile.write(documents, tokenizer, tmp_path)
    file = TokenFile.open(tmp_path)
    assert (file.num_documents, file.num_bytes) == (2, 2 + 250)  # é is two bytes; prompts are not counted
    assert file.document(0).tolist() == [
        BOS,
        *tokenizer.encode("ask", bos=False),
        *tokenizer.encode("é", bos=False),
        EOS,
    ]
    assert file.prompt_len.tolist() == [4, 1]
    assert tokenizer.decode(file.document(1)) == documents[1].text
    with (tmp_path / "tokens.bin").open("ab") as tokens:
        tokens.write(b"\0\0")
    with pytest.raises(ValueError, match="Write it again"):
        TokenFile.open(tmp_path)


def test_token_files_of_different_texts_or_prompts_have_different_fingerprints(tmp_path):
    same = [Document("ab", "ask"), Document("cd")]
    others = [
        [Document("ab", "ask"), Document("ce")],
        [Document("b", "aska"), Document("cd")],  # the same tokens, another prompt
        [Document("cd"), Document("ab", "ask")],
    ]
    prints = [
        TokenFile.write(documents, ByteTokenizer(), tmp_path / str(number)).fingerprint
        for number, documents in enumerate([same, same, *others])
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4
    written = TokenFile.open(tmp_path / "0")
    assert (
        prints[0] == written.fingerprint == replace(written, crc32=None).fingerprint
    )  # the same whether crc32 is stored or computed


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000])
def test_every_epoch_has_a_different_order(size):
    index = torch.arange(size)
    orders = [permute(index, size, seed=0, epoch=torch.full_like(index, epoch)).tolist() for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(size))
    if size >= 16:
        assert len(set(map(tuple, orders))) == 3
        assert orders[0] != permute(index, size, seed=1, epoch=torch.zeros_like(index)).tolist()


def test_a_row_depends_on_its_number_alone(letters):
    whole = source_of(letters)(5, range(6))
    parts = [source_of(letters)(5, rows) for rows in (range(1), range(1, 4), range(4, 6))]
    for name in ("tokens", "prompt_len", "length", "frozen", "documents"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts]))
    assert not torch.equal(whole.tokens, source_of(letters, seed=1)(5, range(6)).tokens)


def rows_of_an_epoch(source):
    steps = -(-source.num_rows // source.batch_size)
    for step in range(steps):
        batch = source(step, range(source.batch_size))
        for row in range(min(source.batch_size, source.num_rows - step * source.batch_size)):
            yield batch.select(slice(row, row + 1))


def numbered(lengths):
    """Return documents whose tokens are their own indices in the file, which shows what a row visits."""
    num_tokens = sum(lengths)
    return TokenFile(
        tokens=np.arange(num_tokens, dtype=np.uint32),
        starts=np.array([0, *np.cumsum(lengths)]),
        prompt_len=np.ones(len(lengths), dtype=np.int64),
        num_bytes=num_tokens,
        vocab_size=num_tokens + 1,
        eos_token_id=num_tokens,
    )


def first_epochs(file, num_epochs, **changes):
    """All rows of each of the first epochs."""
    num_rows = source_of(file, **changes).num_rows
    whole = range(num_epochs * num_rows)
    batch = source_of(file, batch_size=len(whole), **changes)(0, whole)
    return [batch.select(slice(first, first + num_rows)) for first in whole[::num_rows]]


@pytest.mark.parametrize(("canvas_len", "num_canvases"), [(8, 3), (5, 7), (1, 2)])
@pytest.mark.parametrize(
    "lengths",
    [[2000], [2001], [5] * 300, [7], [8], [9], [2], list(range(2, 90)), [3, 200, 3, 9, 17, 25, 33, 3, 64, 65]],
    ids=["long", "long and one", "tiny", "one short", "one canvas", "one more", "empty", "all lengths", "mixed"],
)
def test_an_epoch_visits_every_token_exactly_once(lengths, canvas_len, num_canvases):
    file = numbered(lengths)
    once = np.ones(file.num_tokens)
    once[file.starts[:-1]] = 0  # begin-of-text is never a target
    for rows in first_epochs(file, 2, canvas_len=canvas_len, num_canvases=num_canvases):
        place = torch.arange(rows.tokens.shape[1])
        answer = (place >= rows.prompt_len[:, None]) & (place < rows.length[:, None])
        visits = np.zeros(file.num_tokens)
        np.add.at(visits, rows.tokens[answer & ~rows.frozen & ~rows.fill].numpy(), 1)
        assert (visits == once).all()


def test_rows_are_contiguous_text_with_fill_only_at_document_ends():
    file = numbered([3, 200, 3, 9, 17, 25, 33, 3, 64, 65])
    epochs = first_epochs(file, 3)
    for row in (rows.select(slice(n, n + 1)) for rows in epochs for n in range(rows.batch_size)):
        length, tokens, documents = int(row.length), row.tokens[0].numpy(), row.documents[0].numpy()
        is_text = ~row.fill[0].numpy() & (np.arange(len(tokens)) < length)
        for document in range(documents.max() + 1):
            piece = tokens[is_text & (documents == document)]
            assert (np.diff(piece) == 1).all()
            fill = (row.fill[0].numpy() & (documents == document)).sum()
            assert fill < 8  # every canvas has text
            assert fill == 0 or piece[-1] + 1 in file.starts  # only the end of a document is filled
    assert epochs[0].batch_size == -(
        -2 * sum(-(-n // 8) for n in np.diff(file.starts)) // 5
    )  # three canvases, then two


def test_epochs_cut_a_long_text_at_different_places():
    # For rows that do not begin the text: the place of their first canvas in the text, modulo the canvas length of 8.
    phases = []
    for length in (200, 193):  # without fill, and with seven tokens of it
        epochs = first_epochs(numbered([length]), 60)
        starts = [int(t[p]) for rows in epochs for t, p in zip(rows.tokens, rows.prompt_len, strict=True) if t[0] > 0]
        phases.append({start % 8 for start in starts})
    assert phases == [{0, 1}, set(range(8))]  # 1: in the epochs where begin-of-text is a context


def test_no_canvas_holds_two_documents_and_each_ends_filled(letters):
    for row in rows_of_an_epoch(source_of(letters)):
        prompt, length = int(row.prompt_len), int(row.length)
        tokens, documents = row.tokens[0].tolist(), row.documents[0].tolist()
        assert (length - prompt) % 8 == 0
        for start in range(prompt, length, 8):
            assert len(set(documents[start : start + 8])) == 1
        for number in set(documents[:length]):
            text = [t for t, d in zip(tokens[:length], documents[:length], strict=True) if d == number]
            assert len({t for t in text if t > 4}) <= 1  # one letter: one document
            if EOS in text:
                assert set(text[text.index(EOS) :]) == {EOS}


def test_a_document_inside_a_row_begins_with_a_frozen_begin_of_text(letters):
    pins = 0
    for row in rows_of_an_epoch(source_of(letters)):
        where = row.frozen[0].nonzero()[:, 0]
        begins = (row.tokens[0] == BOS) & row.frozen[0]
        pins += int(begins.sum())
        assert (row.documents[0, begins].diff() > 0).all()
        # Other frozen tokens were visited in an earlier row. They start the first canvas.
        others = where[~begins[where]]
        assert others.tolist() == list(range(int(row.prompt_len), int(row.prompt_len) + len(others)))
        # An unfrozen begin-of-text occurs only as the first token of a row's prompt.
        prompts = ((row.tokens[0] == BOS) & ~row.frozen[0]).nonzero()[:, 0].tolist()
        assert prompts in ([], [0])
    assert pins > 5


def test_contexts_of_all_lengths_come_in_batches_of_one_shape(letters):
    seen = set()
    for step in range(40):
        batch = source_of(letters)(step, range(6))
        assert batch.tokens.shape == (6, 1 + 24)
        assert ((batch.length - batch.prompt_len) % 8 == 0).all()
        seen |= set(batch.prompt_len.tolist())
    assert seen == set(range(9))  # 0 if a row starts with a frozen begin-of-text


def test_packed_rows_cost_what_their_documents_cost_alone(tmp_path):
    """A second document in the row changes nothing, because `documents` separates them."""
    torch.manual_seed(0)
    model = DiffusionGemma(presets.tiny().replace(canvas_length=8), dtype=torch.float64)
    objective = Objective(noise=UniformNoise(512), canvas_len=8, canvases="all")
    rows = []
    for other in ("x" * 30, "y" * 30):
        file = TokenFile.write([Document("abcdefgh"), Document(other)], ByteTokenizer(), tmp_path / other[0])
        source = source_of(file, num_canvases=4, batch_size=1)
        made = (source(step, range(1)) for step in range(99))
        row = next(r for r in made if r.prompt_len == 1 and r.length == 33 and r.tokens[0, :2].tolist() == [BOS, 225])
        rows.append(row)
    # The first document is eight letters and an end: two canvases. The rest of the row is the other's.
    drawn = [objective.draw(row, torch.zeros(1, dtype=torch.int64)) for row in rows]
    first, second = (each.canvases.x for each in drawn)
    assert first[0, :2].tolist() == second[0, :2].tolist()
    assert first[0, 2:].tolist() != second[0, 2:].tolist()
    hidden = [run_text_and_canvases(model, *each).canvases for each in drawn]
    torch.testing.assert_close(hidden[0][:, :2], hidden[1][:, :2], rtol=0, atol=1e-12)


def test_prompts_and_answers_get_a_row_each_and_cuts_are_marked(tmp_path):
    documents = [Document("4", "2+2="), Document("a very long answer", "why?")]
    file = TokenFile.write(documents, ByteTokenizer(), tmp_path)
    batch = PromptSource(file=file, max_len=12, batch_size=2)(0, range(2))
    order = batch.tokens[:, 1].argsort()  # "2" before "w"
    assert batch.prompt_len[order].tolist() == [5, 5]
    assert batch.length[order].tolist() == [7, 12]
    assert batch.truncated[order].tolist() == [False, True]
    assert ByteTokenizer().decode(batch.tokens[order[0], :7]) == "2+2=4"
    fitting = PromptSource(file=file, max_len=7, batch_size=2)(0, range(2))
    assert fitting.truncated[fitting.tokens[:, 1].argsort()].tolist() == [False, True]  # 7 tokens are not cut
    with pytest.raises(ValueError, match="longest prompt, 5 tokens, got 5"):
        PromptSource(file=file, max_len=5, batch_size=2)


def test_a_scan_scores_every_token_once_with_its_context(letters):
    batch = scan(letters, row_len=8, context=5)
    scored = []
    for tokens, prompt, length in zip(
        batch.tokens.tolist(), batch.prompt_len.tolist(), batch.length.tolist(), strict=True
    ):
        assert 1 <= prompt <= 5
        scored += tokens[prompt:length]
    expected = [t for number in range(26) for t in letters.document(number)[1:].tolist()]
    assert scored == expected
    assert int((~batch.truncated).sum()) == 26  # each document ends once
    assert batch.text.unique(return_counts=True)[1].tolist() == [-(-(n + 2) // 8) for n in range(26)]  # rows of each


def test_prompts_are_not_running_text(tmp_path):
    file = TokenFile.write([Document("4", "2+2="), Document("free")], ByteTokenizer(), tmp_path)
    with pytest.raises(ValueError, match=r"running text, without prompts, .*got 1 prompts. Use PromptSource"):
        source_of(file)


STORY = ["The cat sat on the mat, and the dog sat by the cat. " * 20, "In 1984 there were 1984 cats."]


def test_a_trained_tokenizer_round_trips_any_text(tmp_path):
    tokenizer = train_tokenizer(STORY, 285, tmp_path)
    for text in ("the cat", " héé\t\r\n\n 中文 🙂", "\x00\x7f", "x" * 100, "1984<mask>"):
        assert tokenizer.decode(tokenizer.encode(text, bos=False), skip_special=False) == text
    assert len(tokenizer.encode(" the cat", bos=False)) <= 2
    assert len(tokenizer.encode("1984", bos=False)) == 4  # digits are not merged, although this number is frequent


def test_a_trained_tokenizer_has_the_published_ids_here_and_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    train_tokenizer(STORY, 285, tmp_path)
    ours, theirs = Tokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs) == 285
    assert (ours.pad_token_id, ours.eos_token_id, ours.bos_token_id, ours.mask_token_id) == (0, 1, 2, 4)
    assert theirs.encode(STORY[1]) == ours.encode(STORY[1])


def test_a_vocabulary_that_the_text_cannot_fill_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 261"):
        train_tokenizer(STORY, 260, tmp_path)
    with pytest.raises(ValueError, match="Use more text"):
        train_tokenizer(["ab"], 1000, tmp_path)
    assert json.dumps([p.name for p in tmp_path.iterdir()]) == "[]"


@pytest.mark.parametrize("marker", ["<mask>", "<eos>", "<bos>", "<pad>"])
def test_text_with_a_marker_is_refused_by_name(tmp_path, marker):
    # The tokenizer would encode it as the special token: a false end of the text, or a mask.
    with pytest.raises(ValueError, match=f"contain the special token {marker}.*document 1"):
        TokenFile.write([Document("fine"), Document(f"not {marker} fine")], ByteTokenizer(), tmp_path / "t")


def test_a_source_refuses_rows_beyond_its_batch(tmp_path):
    file = TokenFile.write([Document("some running text " * 40)], ByteTokenizer(), tmp_path / "t")
    source = TextSource(file=file, canvas_len=8, num_canvases=2, batch_size=4)
    source(0, range(4))
    with pytest.raises(ValueError, match=r"batch_size must equal TrainConfig\.batch_size, with row 7 requested, got 4"):
        source(0, range(8))


def write_chat(path, *turns, **more):
    messages = [dict(zip(("role", "content", "tool_calls"), turn, strict=False)) for turn in turns]
    path.write_text(json.dumps({"messages": messages, **more}) + "\n")


def test_a_chat_gives_a_document_per_turn_of_the_model(tmp_path):
    thought = "<|channel>thought\n3 - 1<channel|>2"
    turns = [
        ("system", "Be brief."),
        ("user", "1 + 1?"),
        ("assistant", "2"),
        ("user", "3 - 1?"),
        ("assistant", thought),
    ]
    write_chat(tmp_path / "chats.jsonl", *turns)
    tokenizer = ByteTokenizer()
    file = TokenFile.write(read_documents(tmp_path / "chats.jsonl"), tokenizer, tmp_path / "tokens")
    assert file.num_documents == 2
    first = "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\n1 + 1?<turn|>\n<|turn>model\n"
    # The second turn has a thought, so its prompt asks for one. The published template puts the request first.
    second = first.replace("Be brief.", "<|think|>\nBe brief.") + "2<turn|>\n<|turn>user\n3 - 1?<turn|>\n<|turn>model\n"
    for number, (prompt, answer) in enumerate([(first, "2<turn|>"), (second, thought + "<turn|>")]):
        row, prompt_len = file.document(number).tolist(), int(file.prompt_len[number])
        assert tokenizer.decode(row[:prompt_len], skip_special=False) == prompt
        assert tokenizer.decode(row[prompt_len:], skip_special=False) == answer + "<eos>"
    batch = PromptSource(file=file, max_len=256, batch_size=2)(0, range(2))
    assert sorted(batch.prompt_len.tolist()) == sorted(file.prompt_len.tolist())


@pytest.mark.parametrize(
    ("turns", "more", "message"),
    [
        ([("user", "hi")], {}, "chat.jsonl:1 must have a turn of the assistant after another turn"),
        ([("assistant", "hi")], {}, "chat.jsonl:1 must have a turn of the assistant after another turn"),
        ([("user", "hi"), ("bot", "ho")], {}, "chat.jsonl:1 turn 2 must have a role of assistant"),
        ([("user", 3), ("assistant", "ho")], {}, 'chat.jsonl:1 turn 1 must have a text as "content", got 3'),
        ([("user", "hi"), ("assistant", "ho")], {"tools": "all"}, 'chat.jsonl:1 "tools" must be a list'),
        ([("user", "hi"), ("assistant", 3, [{}])], {}, 'chat.jsonl:1 turn 2 must have a text as "content", got 3'),
    ],
    ids=["no-answer", "no-question", "role", "content", "tools", "call"],
)
def test_a_chat_that_does_not_fit_is_named_by_its_line(tmp_path, turns, more, message):
    write_chat(tmp_path / "chat.jsonl", *turns, **more)
    with pytest.raises(ValueError, match=re.escape(message)):
        list(read_documents(tmp_path / "chat.jsonl"))


def test_a_chat_that_the_template_refuses_is_named_by_its_line(tmp_path):
    write_chat(tmp_path / "chat.jsonl", ("user", "hi"), ("tool", "42"), ("assistant", "ho"))
    with pytest.raises(ValueError, match=r"chat\.jsonl:1: ByteTokenizer\.chat role must be user or assistant"):
        TokenFile.write(read_documents(tmp_path / "chat.jsonl"), ByteTokenizer(), tmp_path / "tokens")


@pytest.mark.slow  # needs extras that only developers install
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_dataset_gives_the_documents_of_its_rows(tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"question": "2 + 2?", "answer": "4"}, {"question": "3 + 3?", "answer": "6"}])
    (tmp_path / "sums").mkdir()
    path = str(tmp_path / "sums" / f"train.{kind}")
    rows.to_json(path) if kind == "jsonl" else rows.to_parquet(path)
    found = read_dataset(str(tmp_path / "sums"), split="train[1:]")
    assert list(found) == [Document("6", "3 + 3?")]
    with pytest.raises(ValueError, match=r"sums cannot be read \(Unknown split .*\)\. Name a dataset of the hub"):
        list(read_dataset(str(tmp_path / "sums"), split="test"))


def test_columns_that_a_row_of_a_dataset_lacks_do_not_count(tmp_path):
    pytest.importorskip("datasets")
    lines = [{"text": "a"}, {"prompt": "b", "answer": "c", "images": ["d.png"]}, {"prompt": "e", "answer": "f"}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    expected = [Document("a"), Document("c", "b", images=("d.png",)), Document("f", "e")]
    assert list(read_dataset(str(tmp_path))) == expected  # the library gives each row all columns, as None
