"""A corpus in a folder: train.txt, validation.txt and test.txt, with a tokenizer and tokens that are cached."""

from dataclasses import dataclass
from pathlib import Path

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import require
from dgemma.data.documents import read_documents
from dgemma.data.token_file import TokenFile
from dgemma.data.vocabulary import train_tokenizer

SEPARATOR = "\f"  # between two documents


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A tokenizer trained on the training text, and the tokens of the three parts."""

    tokenizer: Tokenizer
    train: TokenFile
    validation: TokenFile
    test: TokenFile


def prepare_corpus(folder: str | Path, vocab_size: int) -> Corpus:
    """Open a corpus; make `tokenizer/` and `tokens/` first if they are missing.

    Documents are separated by a form feed. A changed text is not noticed: delete both folders yourself.

    Example: `prepare_corpus("runs/corpus", vocab_size=4096).train.num_tokens`.
    """
    folder = Path(folder)
    tokenizer_folder = folder / "tokenizer"
    if (tokenizer_folder / "tokenizer_config.json").is_file():
        tokenizer = Tokenizer.from_pretrained(tokenizer_folder)
    else:
        texts = (document.text for document in read_documents(folder / "train.txt", separator=SEPARATOR))
        tokenizer = train_tokenizer(texts, vocab_size, tokenizer_folder)
    rule = f"be {tokenizer.vocab_size}, as in {tokenizer_folder}"
    fix = f"Delete that folder and {folder / 'tokens'} to make them again."
    require(tokenizer.vocab_size == vocab_size, "prepare_corpus vocab_size", rule, vocab_size, fix)
    return Corpus(
        tokenizer=tokenizer,
        **{part: _tokenise(folder, part, tokenizer) for part in ("train", "validation", "test")},
    )


def _tokenise(folder: Path, part: str, tokenizer: Tokenizer) -> TokenFile:
    token_folder = folder / "tokens" / part
    if (token_folder / "about.json").is_file():  # written last, so the folder is complete
        return TokenFile.open(token_folder)
    return TokenFile.write(read_documents(folder / f"{part}.txt", separator=SEPARATOR), tokenizer, token_folder)
