"""Other bidirectional models as denoisers: masked language models of Hugging Face such as LLaDA, Dream and BERT.

Such a model has no cache of keys and values, because every token sees every other. So the prefix cache is the prefix's
tokens, and each step runs the whole row: the prefix, then the canvas. Text after the canvas does not exist yet.
"""

from typing import Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.checks import in_range, require, typed
from dgemma.diffusion.prediction import Prediction
from dgemma.model.config import DenoiserConfig, GenerationDefaults
from dgemma.model.denoiser import Denoiser

AttentionMask = Literal["padding", "pairs", "none"]

_LENGTH_FIELDS = ("max_position_embeddings", "max_sequence_length", "n_positions")  # the last two: LLaDA, GPT-2
_PROBE_LEN = 6


@typed
def wrap(
    hf_model: nn.Module,
    *,
    canvas_len: int,
    mask_token_id: int | None = None,
    shift: bool = False,
    attention_mask: AttentionMask = "padding",
    max_positions: int | None = None,
) -> "Wrapped":
    """Turn a bidirectional masked language model of Hugging Face into a `Denoiser`.

    hf_model: called as `hf_model(input_ids=(B, T), attention_mask=...)`, it returns an object with `logits` (B, T, V).

    - `canvas_len`: the positions that are denoised together. To generate as LLaDA does, pass LLaDA's `gen_length`.
    - `mask_token_id`: None takes it from the model's config.
    - `shift`: True if the logits at position i predict token i + 1, as in Dream.
    - `attention_mask`: the form that the model takes. "padding" is (B, T) with 1 for real tokens (BERT, LLaDA).
      "pairs" is (B, 1, T, T) bool (Dream; also makes the causal models of transformers bidirectional). "none" passes no
      mask: rows of equal length run together.
    - `max_positions`: the longest row; None takes it from the model's config.

    The result generates under `MaskNoise`, by default as LLaDA does: `Confidence(greedy=True)`, one token per step. Its
    `generation` holds these defaults. The model is put into evaluation mode. Two short forwards check that it sees
    tokens to the right, and that padding does not change a row.

    Example: `dgemma.wrap(BertForMaskedLM.from_pretrained(path), canvas_len=32, mask_token_id=103)`.
    """
    config = getattr(hf_model, "config", None)
    if mask_token_id is None:
        mask_token_id = getattr(config, "mask_token_id", None)
    if max_positions is None:
        max_positions = next((n for name in _LENGTH_FIELDS if (n := getattr(config, name, None)) is not None), None)
    vocab_size = _probe(hf_model.eval(), attention_mask)
    fits, rule = mask_token_id in range(vocab_size), f"be an id below the vocabulary's {vocab_size}"
    require(fits, "wrap mask_token_id", rule, mask_token_id, "Take it from the model's tokenizer.")
    fix = "The model's config has none: pass it."
    require(max_positions is not None, "wrap max_positions", "be a number of tokens", max_positions, fix)
    mask, longest = cast(int, mask_token_id), cast(int, max_positions)
    sizes = DenoiserConfig(vocab_size=vocab_size, canvas_length=canvas_len, max_position_embeddings=longest)
    return Wrapped(hf_model, sizes, _defaults(hf_model, canvas_len, mask), shift=shift, attention_mask=attention_mask)


class TokenCache:
    """The tokens of a prefix: `tokens` (B, S) int64, left-aligned, of which row b has `lengths[b]`.

    It has the members of `Cache`. Example: `wrapped.encode(prompt).tokens`.
    """

    def __init__(self, tokens: Tensor, lengths: Tensor, num_seen: int) -> None:
        self.tokens, self.lengths, self.num_seen = tokens, lengths, num_seen

    def __repr__(self) -> str:
        return f"{type(self).__name__}(lengths={self.lengths.tolist()})"

    @property
    def batch_size(self) -> int:
        return self.lengths.shape[0]

    @property
    def num_slots(self) -> int:
        """The number of tokens of the longest row."""
        return self.tokens.shape[1]

    @classmethod
    def empty(cls, batch_size: int, device: torch.device | str) -> Self:
        """Return the cache of an empty prefix."""
        tokens = torch.zeros(batch_size, 0, dtype=torch.int64, device=device)
        return cls(tokens, tokens.sum(1), 0)

    def append(self, tokens: Tensor, attention_mask: Tensor | None = None) -> None:
        """Add tokens (B, T). The mask, (B, T) or (B, num_seen + T), is 1 for real tokens and 0 for padding."""
        attention_mask = torch.ones_like(tokens) if attention_mask is None else attention_mask
        real = attention_mask[:, attention_mask.shape[1] - tokens.shape[1] :].to(tokens.device).bool()
        old = torch.arange(self.num_slots, device=self.lengths.device) < self.lengths[:, None]
        kept, joined = torch.cat((old, real), dim=1), torch.cat((self.tokens, tokens), dim=1)
        order = (~kept).to(torch.uint8).sort(dim=1, stable=True).indices  # the row's tokens first, in order
        self.lengths = kept.sum(1)
        self.tokens = joined.gather(1, order)[:, : int(self.lengths.max())]
        self.num_seen += tokens.shape[1]

    def clone(self) -> Self:
        """An independent copy. It can share its tensors, because `append` makes new ones."""
        return type(self)(self.tokens, self.lengths, self.num_seen)

    def select(self, rows: Tensor) -> Self:
        """The cache of some rows: rows (R,) int64 → batch size R."""
        return type(self)(self.tokens[rows], self.lengths[rows], self.num_seen)

    def splice(self, rows: Tensor, donor: "TokenCache") -> None:
        """Replace `rows` (R,) in place by the rows of a donor of batch size R."""
        size = max(self.num_slots, donor.num_slots)
        mine, theirs = (F.pad(cache.tokens, (0, size - cache.num_slots)) for cache in (self, donor))
        self.lengths = self.lengths.index_copy(0, rows, donor.lengths)
        self.tokens = mine.index_copy(0, rows, theirs)[:, : int(self.lengths.max())]
        self.num_seen = max(self.num_seen, donor.num_seen)


class Wrapped(Denoiser[TokenCache]):
    """The result of `wrap`. `encode` keeps the tokens, and `denoise` runs the model over prefix and canvas.

    It ignores self-conditioning. The model is `hf_model`; its gradients are kept.
    """

    config: DenoiserConfig
    generation: GenerationDefaults

    def __init__(
        self,
        hf_model: nn.Module,
        config: DenoiserConfig,
        generation: GenerationDefaults,
        *,
        shift: bool,
        attention_mask: AttentionMask,
    ) -> None:
        self.hf_model, self.config, self.generation = hf_model, config, generation
        self.shift, self.attention_mask = shift, attention_mask

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.hf_model).__name__}, {self.config})"

    @property
    def device(self) -> torch.device:
        return next(self.hf_model.parameters()).device

    def encode(
        self, tokens: Tensor, cache: TokenCache | None = None, attention_mask: Tensor | None = None
    ) -> TokenCache:
        """Keep tokens (B, P) as the prefix; a given cache is extended in place and returned.

        attention_mask, (B, P) or (B, cached + P), is 1 for real tokens and 0 for padding.
        """
        fits, vocab_size = in_range(tokens, self.config.vocab_size), self.config.vocab_size
        require(fits, "Wrapped.encode tokens", f"hold ids in [0, {vocab_size})", tokens, "Use the model's tokenizer.")
        cache = TokenCache.empty(len(tokens), tokens.device) if cache is None else cache
        cache.append(tokens.long(), attention_mask)
        return cache

    def denoise(
        self,
        canvas: Tensor,
        cache: TokenCache,
        self_cond: Prediction | Tensor | None = None,
        self_cond_mask: Tensor | None = None,
    ) -> Prediction:
        """Predict every position of canvas (B, C) from the prefix and the canvas. Self-conditioning is ignored."""
        columns = cache.lengths[:, None] + torch.arange(canvas.shape[1], device=canvas.device)  # (B, C)
        rows = F.pad(cache.tokens, (0, canvas.shape[1])).scatter(1, columns, canvas)
        source = (columns - 1).clamp(min=0) if self.shift else columns
        lengths = cache.lengths + canvas.shape[1]
        if self.attention_mask != "none":
            return Prediction(_select(_run(self.hf_model, rows, lengths, self.attention_mask), source))
        parts = []  # rows of one length, and their logits
        for length in lengths.unique().tolist():
            same = (lengths == length).nonzero()[:, 0]
            parts.append((same, _select(_run(self.hf_model, rows[same, :length], lengths[same], "none"), source[same])))
        back = torch.cat([same for same, _ in parts]).argsort()
        return Prediction(torch.cat([logits for _, logits in parts])[back])


def _run(hf_model: nn.Module, rows: Tensor, lengths: Tensor, attention_mask: AttentionMask) -> Tensor:
    """Return the logits (B, T, V) of left-aligned rows (B, T) with `lengths` (B,) tokens each."""
    real = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
    options: dict[str, Tensor] = {}
    if attention_mask == "padding":
        options["attention_mask"] = real.long()
    elif attention_mask == "pairs":
        # Padding sees itself: a query without any key would be NaN in some attention kernels.
        itself = torch.eye(rows.shape[1], dtype=torch.bool, device=rows.device)
        options["attention_mask"] = (real[:, None, None, :] & real[:, None, :, None]) | itself
    logits: Tensor = hf_model(input_ids=rows, **options).logits
    return logits


def _select(logits: Tensor, columns: Tensor) -> Tensor:
    """Return logits (B, T, V) at columns (B, C) → (B, C, V)."""
    return logits.gather(1, columns[..., None].expand(-1, -1, logits.shape[-1]))


@torch.no_grad()
def _probe(hf_model: nn.Module, attention_mask: AttentionMask) -> int:
    """Check on two short rows that the model is bidirectional and ignores padding; return its vocabulary's size."""
    device = next(hf_model.parameters()).device
    rows = torch.arange(1, _PROBE_LEN + 1, device=device).expand(2, -1).clone()
    rows[1, -1] += 1
    lengths = torch.full((2,), _PROBE_LEN, device=device)
    logits = _run(hf_model, rows, lengths, attention_mask)
    if torch.equal(logits[0, 0], logits[1, 0]):
        fix = 'Pass attention_mask="pairs", or load a bidirectional model.'
        raise ValueError(f"wrap hf_model must see tokens to the right, got {type(hf_model).__name__}. {fix}")
    if attention_mask != "none":
        cut = _run(hf_model, rows, lengths - 1, attention_mask)[:, : _PROBE_LEN - 1]  # the rows differ in padding only
        tolerance = 1e-2 if logits.dtype in (torch.float16, torch.bfloat16) else 1e-4
        if not torch.allclose(cut[0], cut[1], atol=tolerance, rtol=tolerance):
            fix = f'Pass attention_mask="none" or {"pairs" if attention_mask == "padding" else "padding"!r}.'
            raise ValueError(f"wrap hf_model must ignore padding, got {type(hf_model).__name__}. {fix}")
    return logits.shape[-1]


def _defaults(hf_model: nn.Module, canvas_len: int, mask_token_id: int) -> GenerationDefaults:
    """Return LLaDA's defaults, with the stop and padding ids of the model's configs."""
    configs = [getattr(hf_model, name, None) for name in ("generation_config", "config")]

    def setting(name: str) -> Any:
        return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)

    eos, pad = setting("eos_token_id"), setting("pad_token_id")
    stops = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return GenerationDefaults(
        max_new_tokens=canvas_len,
        max_denoising_steps=canvas_len,
        t_max=1.0,
        t_min=1.0,
        confidence_threshold=0.0,
        eos_token_id=stops,
        pad_token_id=pad if isinstance(pad, int) else (*stops, 0)[0],
        noise={"kind": "mask", "mask_token_id": mask_token_id},
        sampler={"name": "confidence", "greedy": True},
    )
