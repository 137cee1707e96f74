"""A corpus is tokenised once, by a tokenizer that was trained only on its training text."""

import pytest

from dgemma.data import corpus
from dgemma.data.corpus import prepare_corpus

VOCAB = 270  # the minimum of 261, plus nine merges


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.txt").write_text("the tree by the house\fthe other tree")
    (tmp_path / "validation.txt").write_text("zebra zebra zebra zebra zebra zebra")
    (tmp_path / "test.txt").write_text("the other house")
    return tmp_path


def test_all_parts_use_a_tokenizer_of_the_training_text(folder):
    made = prepare_corpus(folder, VOCAB)
    assert made.tokenizer.vocab_size == VOCAB
    assert (made.train.num_documents, made.validation.num_documents, made.test.num_documents) == (2, 1, 1)
    assert made.tokenizer.decode(made.train.document(1)) == "the other tree"
    assert len(made.tokenizer.encode("the", bos=False)) == 1
    assert len(made.tokenizer.encode("zebra", bos=False)) == 5  # not in the training text


def test_complete_parts_are_kept_and_incomplete_ones_are_made_again(folder, monkeypatch):
    first = prepare_corpus(folder, VOCAB)
    (folder / "tokens" / "test" / "about.json").unlink()  # as if killed while it was written
    monkeypatch.setattr(corpus, "train_tokenizer", None)
    (folder / "train.txt").unlink()
    second = prepare_corpus(folder, VOCAB)
    for part in ("train", "validation", "test"):
        assert getattr(second, part).tokens.tolist() == getattr(first, part).tokens.tolist()


def test_a_different_vocab_size_is_refused(folder):
    prepare_corpus(folder, VOCAB)
    with pytest.raises(ValueError, match="vocab_size must be 270, as in"):
        prepare_corpus(folder, 280)
