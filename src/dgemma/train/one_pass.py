"""All canvases of a row in one pass (BD3-LM, arXiv:2503.09573). Reference: `encode` and `denoise` per canvas.

The clean text is read once, causally. Then every canvas, at its own noise level, sees the clean tokens before its start
and itself. It sees neither other canvases nor the clean tokens that it must predict. Rows are right-padded, so a
token's position is its index.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dgemma.doors import replaceable
from dgemma.model.attention import Mask
from dgemma.model.backbone import KeysValues
from dgemma.model.config import LayerShape
from dgemma.model.diffusion import DiffusionGemma
from dgemma.model.masks import same_image
from dgemma.model.vision.images import Images
from dgemma.train import head
from dgemma.train.canvases import Canvases, NoisyCanvases


class CleanText(NamedTuple):
    """The encoded clean tokens: hidden (B, P, D), and each layer's keys and values (B, K, P, H)."""

    hidden: Tensor
    keys_values: list[KeysValues]

    def first(self, num_tokens: int) -> "CleanText | None":
        """Return the first `num_tokens` tokens, which a canvas after them sees; None for zero tokens."""
        if num_tokens == 0:
            return None
        keys_values = [(keys[:, :, :num_tokens], values[:, :, :num_tokens]) for keys, values in self.keys_values]
        return CleanText(self.hidden[:, :num_tokens], keys_values)


def read_clean(
    model: DiffusionGemma, tokens: Tensor, *, documents: Tensor | None = None, images: Images | None = None
) -> CleanText:
    """Read tokens (B, P) and their images, with gradients.

    documents (B, P) numbers texts that must not see each other.
    """
    x, image_index = model.embed_prompt(tokens, images)
    masks = text_masks(model, tokens, documents=documents, image_index=image_index)
    return CleanText(*model.run(x, text_positions(tokens), [None] * len(masks), masks, causal=True))


def text_positions(tokens: Tensor) -> Tensor:
    """Return the positions (B, P) of clean tokens (B, P)."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)


def text_masks(
    model: DiffusionGemma, tokens: Tensor, *, documents: Tensor | None, image_index: Tensor | None
) -> list[Mask | None]:
    """Return each layer's mask for clean tokens (B, P) of these documents and images (see `find_blocks`)."""
    position = torch.arange(tokens.shape[1], device=tokens.device)
    key, query = position, position[:, None]

    def mask_of(shape: LayerShape) -> Mask:
        if documents is None and image_index is None and (shape.window is None or shape.window >= len(position)):
            return "causal"
        visible = key <= query
        if shape.window is not None:
            visible = visible & (key > query - shape.window)
        if documents is not None:
            visible = visible & (documents[:, :, None] == documents[:, None])  # (B, P, P)
        if image_index is not None:
            visible = visible | same_image(image_index)
        return visible.view(-1, 1, *visible.shape[-2:])

    return _masks(model, mask_of)


def canvas_masks(
    model: DiffusionGemma,
    starts: Tensor,
    canvas_len: int,
    num_clean: int,
    *,
    documents: tuple[Tensor, Tensor] | None = None,
    aligned: bool = False,
) -> list[Mask | None]:
    """Return each layer's mask for canvases that start at positions (B, K), after `num_clean` tokens of clean text.

    documents: number of the document of each clean token (B, P) and of each canvas token (B, K, C). aligned: True
    promises that K is 1 and every canvas starts at `num_clean`; then no mask is needed unless the window is too short.
    """
    num_noisy = starts.shape[1] * canvas_len
    extra = 1 if model.conventions.sliding_prefix == "window" else 0
    both = None
    if documents is not None:
        both = torch.cat((documents[0][:, :num_clean], documents[1].flatten(1)), dim=1)  # (B, P + K·C)
    # All positions of a canvas see the same keys, so one query is enough for the mask.
    query = torch.arange(1 if starts.shape[1] == 1 and both is None else num_noisy, device=starts.device)
    key = torch.arange(num_clean + num_noisy, device=starts.device)
    start, canvas = starts[:, query // canvas_len, None], (query // canvas_len)[:, None]  # (B, Q, 1), (Q, 1)

    def mask_of(shape: LayerShape) -> Mask | None:
        reach = None if shape.window is None else shape.window - 1 + extra
        if aligned and both is None and (reach is None or reach >= num_clean):
            return None
        before = key < start
        if reach is not None:
            before = before & (key >= start - reach)
        visible = torch.where(key < num_clean, before, (key - num_clean) // canvas_len == canvas)  # (B, Q, S)
        if both is not None:
            visible = visible & (both[:, num_clean:, None] == both[:, None])
        return visible[:, None]

    return _masks(model, mask_of)


def predict_canvases(
    model: DiffusionGemma,
    canvases: Tensor,
    starts: Tensor,
    clean: CleanText | None = None,
    masks: Sequence[Mask | None] | None = None,
    *,
    signal: Tensor | None = None,
    noise_level: Tensor | None = None,
) -> Tensor:
    """Return the last hidden states (B, K, C, D) of canvases (B, K, C) that start at positions (B, K).

    clean: the text before them; None if all start at 0. masks: those of `canvas_masks`, by default for one text per
    row. signal: self-conditioning (B, K, C, D). noise_level: (B, K, C), for a model that takes it.
    """
    _, num_canvases, canvas_len = canvases.shape
    if masks is None:
        masks = canvas_masks(model, starts, canvas_len, 0 if clean is None else clean.hidden.shape[1])
    x, positions = embed_canvases(model, canvases, signal, noise_level), canvas_positions(starts, canvas_len)
    pasts = [None] * len(masks) if clean is None else clean.keys_values
    hidden, _ = model.run(x, positions, pasts, masks, causal=False)
    return hidden.unflatten(1, (num_canvases, canvas_len))


def embed_canvases(
    model: DiffusionGemma, canvases: Tensor, signal: Tensor | None, noise_level: Tensor | None
) -> Tensor:
    """Return the layers' input (B, K·C, D), with the arguments of `predict_canvases`."""
    levels = None if noise_level is None else noise_level.flatten(1)
    return model.embed_canvas(canvases.flatten(1), None if signal is None else signal.flatten(1, 2), levels)


def canvas_positions(starts: Tensor, canvas_len: int) -> Tensor:
    """Return the positions (B, K·C) of canvases that start at positions (B, K)."""
    return (starts[..., None] + torch.arange(canvas_len, device=starts.device)).flatten(1)


def _masks(model: DiffusionGemma, mask_of: Callable[[LayerShape], Mask | None]) -> list[Mask | None]:
    """Return the mask of each layer, (B, 1, Q, S) bool if it is a tensor; layers of one kind share it."""
    shapes = [model.config.layer_shape(layer) for layer in range(model.config.num_hidden_layers)]
    masks = {kind: mask_of(shape) for kind, shape in {shape.kind: shape for shape in shapes}.items()}
    return [masks[shape.kind] for shape in shapes]


class LastHidden(NamedTuple):
    """The last hidden states of a text (B, T, D) and of its canvases (B, K, C, D); None for what was not run."""

    text: Tensor | None
    canvases: Tensor | None


@replaceable
def run_text_and_canvases(
    model: DiffusionGemma,
    canvases: Canvases,
    noisy: NoisyCanvases | None,
    *,
    self_cond_off: Literal["zero_signal", "zero_logits"] = "zero_signal",
) -> LastHidden:
    """Read the text causally and denoise its canvases, with gradients.

    The text is read as far as a canvas sees it or the causal term scores it. noisy: None reads only the text.
    self_cond_off: the signal of canvases without self-conditioning, zeros or the mean embedding.
    """
    tokens, documents = text_read(canvases, noisy)
    clean = read_clean(model, tokens, documents=documents, images=canvases.images) if tokens.shape[1] else None
    text = None if clean is None else clean.hidden
    if noisy is None:
        return LastHidden(text, None)
    seen = None if clean is None else clean.first(canvases.prefix_len)
    masks, level = masks_of(model, canvases), position_levels(model, canvases, noisy)

    def predict(signal: Tensor | None) -> Tensor:
        return predict_canvases(model, noisy.z, canvases.starts, seen, masks, signal=signal, noise_level=level)

    return LastHidden(text, predict(self_cond_signal(model, noisy, self_cond_off, predict)))


def text_read(canvases: Canvases, noisy: NoisyCanvases | None) -> tuple[Tensor, Tensor | None]:
    """Return the tokens (B, T) that a step reads, and the numbers (B, T) of their documents in packed rows."""
    length = max(0 if noisy is None else canvases.prefix_len, canvases.causal_scored.shape[1])
    return canvases.tokens[:, :length], None if canvases.documents is None else canvases.documents[0][:, :length]


def masks_of(model: DiffusionGemma, canvases: Canvases) -> list[Mask | None]:
    """Return each layer's mask for these canvases, after the clean text that they see."""
    starts, canvas_len, documents = canvases.starts, canvases.x.shape[-1], canvases.documents
    return canvas_masks(model, starts, canvas_len, canvases.prefix_len, documents=documents, aligned=canvases.aligned)


def position_levels(model: DiffusionGemma, canvases: Canvases, noisy: NoisyCanvases) -> Tensor | None:
    """Return the noise level of each position (B, K, C), 0 for frozen tokens; None if the model takes no level."""
    return torch.where(canvases.frozen, 0.0, noisy.level[..., None]) if model.takes_noise_level else None


def self_cond_signal(
    model: DiffusionGemma, noisy: NoisyCanvases, self_cond_off: str, predict: Callable[[Tensor | None], Tensor]
) -> Tensor | None:
    """Return the self-conditioning signal (B, K, C, D) from a first pass, whose hidden states `predict` returns."""
    off = None
    if self_cond_off == "zero_logits":
        mean = model.soft_embedding(model.embed_tokens.weight.new_zeros(1, 1, model.config.vocab_size))
        off = mean.expand(*noisy.z.shape, -1)
    if noisy.self_cond is None:
        return off
    with torch.no_grad():
        first = predict(off)
    proposable = noisy.noise.proposable(noisy.allowed, first.device)  # as in `generate`
    signal = head.soft_embedding(model, first, allowed=proposable)
    return torch.where(noisy.self_cond[..., None, None], signal, 0.0 if off is None else off)
