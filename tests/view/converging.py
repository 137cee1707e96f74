"""A denoiser that writes a given text. Like a trained one, it is more confident next to right tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dgemma
from dgemma.data import sudoku
from dgemma.model.cache import PrefixCache
from rowwise import RowwiseDenoiser

TEXT = (
    "A canvas of noise is read all at once. Where the model is sure, it writes; where it is not, "
    "the dice are thrown again. A few steps later the sentence stands, as if it had always been there."
)


class Converging(RowwiseDenoiser):
    """Predicts `tokens` (N,). Their logits are higher by `start`, plus up to `gain` next to right tokens."""

    start, gain = 5.5, 10.0

    def __init__(self, tokens: Tensor, canvas_len: int, vocab_size: int = 384) -> None:
        config = dgemma.presets.tiny().replace(vocab_size=vocab_size, canvas_length=canvas_len)
        super().__init__(config, dgemma.GenerationDefaults())
        self.tokens, self.canvas_len, self.vocab_size = tokens, canvas_len, vocab_size

    def encode(
        self, tokens: Tensor, cache: PrefixCache | None = None, attention_mask: Tensor | None = None
    ) -> PrefixCache:
        if cache is None or not cache.num_slots:
            self.prompt_len = tokens.shape[1]
        return super().encode(tokens, cache, attention_mask)

    def denoise(self, canvas: Tensor, cache: PrefixCache, self_cond: object = None) -> dgemma.Prediction:
        begun = cache.num_slots - self.prompt_len
        target = self.tokens[begun : begun + self.canvas_len]  # (C,)
        right = (canvas == target).float()  # (B, C)
        near = F.avg_pool1d(F.pad(right, (4, 4), value=0.3)[:, None], 9, stride=1)[:, 0]
        position = torch.arange(self.canvas_len)
        noise = torch.sin(position[:, None] * 12.9898 + torch.arange(self.vocab_size) * 78.233) * 1.2  # (C, V)
        ahead = self.start + self.gain * near + 1.5 * torch.sin(position * 2.1)
        logits = noise + ahead[..., None] * F.one_hot(target, self.vocab_size)
        return dgemma.Prediction(logits)


class Words(dgemma.Tokenizer):
    """A tokenizer with the given pieces, such as " the"; ids 0 to 4 are the published special tokens."""

    pad_token_id, eos_token_id, bos_token_id, mask_token_id = 0, 1, 2, 4
    has_chat_template = False

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *pieces]
        self.vocab_size = len(self.pieces)

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        ids = [self.bos_token_id] if bos else []
        while text:
            best = max((p for p in self.pieces if text.startswith(p)), key=len)
            ids.append(self.pieces.index(best))
            text = text[len(best) :]
        return ids

    def token_id(self, token: str) -> int | None:
        return self.pieces.index(token) if token in self.pieces else None

    def save_pretrained(self, path: object) -> None:
        raise NotImplementedError

    def _decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[token] for token in ids)

    def _render(self, messages: list[dict[str, object]], **options: object) -> list[int]:
        raise NotImplementedError


def record(
    text: str = TEXT,
    *,
    tokenizer: dgemma.Tokenizer | None = None,
    rows: int = 1,
    canvas_len: int = 96,
    **options: Any,
) -> tuple[dgemma.Generation, dgemma.Tokenizer]:
    """Return a recorded run that writes `text`, and its tokenizer (by default bytes)."""
    tokenizer = tokenizer or dgemma.ByteTokenizer()
    model, ids = writer_of(text, tokenizer, canvas_len)
    prompt = torch.tensor([[tokenizer.bos_token_id, *ids[:3]]] * rows)
    chosen = {"sampler": dgemma.EntropyBound(bound=0.5), "max_new_tokens": len(ids), "record": True}
    return dgemma.generate(model, prompt, **(chosen | {"temperature": 0.8, "progress": False} | options)), tokenizer


def writer_of(text: str, tokenizer: dgemma.Tokenizer, canvas_len: int) -> tuple[Converging, list[int]]:
    """Return a denoiser that writes `text`, and the text's tokens, filled with stop tokens."""
    ids = tokenizer.encode(text, bos=False)
    ids += [tokenizer.eos_token_id] * (-len(ids) % canvas_len)
    return Converging(torch.tensor(ids), canvas_len, vocab_size=tokenizer.vocab_size), ids


def record_board(**options: Any) -> tuple[dgemma.Generation, str]:
    """Return a recorded run that writes a Sudoku of which the first four cells are frozen, and its 81 digits."""
    digits = [(3 * (y % 3) + y // 3 + x) % 9 + 1 for y in range(9) for x in range(9)]
    canvas = sudoku.canvas_tokens([digits])
    frozen = torch.arange(81)[None] < 4
    out = dgemma.generate(
        Converging(canvas[0], sudoku.NUM_CELLS, vocab_size=sudoku.VOCAB_SIZE),
        sudoku.prompt_tokens(torch.tensor([digits]) * frozen + 4 * (torch.arange(81) == 9)),
        canvas=torch.where(frozen, canvas, -1),
        frozen=frozen,
        noise=sudoku.sudoku_noise("mask"),
        sampler=dgemma.EntropyBound(bound=0.5),
        temperature=1.0,
        allowed=list(sudoku.DIGIT_TOKENS),
        max_new_tokens=81,
        record=True,
        **options,
    )
    return out, "".join(map(str, digits))
