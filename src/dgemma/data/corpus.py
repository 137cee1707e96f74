"""A corpus in a folder: train.txt, validation.txt and test.txt, with a tokenizer trained on it and cached tokens."""

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import require
from dgemma.data.documents import read_documents
from dgemma.data.token_file import TokenFile

SEPARATOR = "\f"  # between two documents
# In the order of their published ids: 0 to 4.
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
_NUM_BYTES = 256


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
        tokenizer=tokenizer, **{part: _tokenise(folder, part, tokenizer) for part in ("train", "validation", "test")}
    )


def _tokenise(folder: Path, part: str, tokenizer: Tokenizer) -> TokenFile:
    token_folder = folder / "tokens" / part
    if (token_folder / "about.json").is_file():  # written last, so the folder is complete
        return TokenFile.open(token_folder)
    return TokenFile.write(read_documents(folder / f"{part}.txt", separator=SEPARATOR), tokenizer, token_folder)


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    out: str | Path,
    *,
    markers: Sequence[str] = (),
    chat_template: str | None = None,
) -> Tokenizer:
    """Train a tokenizer of exactly `vocab_size` ids on texts, and save it in the folder `out`.

    Encoding and decoding change no text, because all bytes are tokens. Digits are never merged. transformers'
    AutoTokenizer reads the folder too. `markers` such as `<|turn>` are single tokens, with the ids after the special
    ones; a chat template needs them.

    Example: `train_tokenizer(["once upon a time", ...], vocab_size=4096, out="checkpoint")`.
    """
    from tokenizers import Tokenizer as Trained
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [*SPECIAL_TOKENS, *markers]
    smallest = len(special) + _NUM_BYTES
    rule = f"be at least {smallest}, for every byte and special token"
    require(vocab_size >= smallest, "train_tokenizer vocab_size", rule, vocab_size)
    trained = Trained(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    found = trained.get_vocab_size()
    rule, fix = f"be reachable from the texts, which give {found}", "Use more text, or a smaller vocab_size."
    require(found == vocab_size, "train_tokenizer vocab_size", rule, vocab_size, fix)
    pad, eos, bos, unk, mask = SPECIAL_TOKENS
    names = {"pad_token": pad, "eos_token": eos, "bos_token": bos, "unk_token": unk, "mask_token": mask}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, add_bos_token=True, **names)
    tokenizer.chat_template = chat_template
    with tempfile.TemporaryDirectory() as folder:  # then copied in one go, so that `out` is complete or absent
        tokenizer.save_pretrained(folder)
        Tokenizer.from_pretrained(folder).save_pretrained(out)
    return Tokenizer.from_pretrained(out)
