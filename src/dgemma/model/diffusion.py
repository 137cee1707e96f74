"""DiffusionGemma: one stack of weights that reads a prefix causally and denoises a canvas against it.

This is the reference, in plain PyTorch with autograd. `dgemma_kernels.accelerate` returns a faster denoiser with the
same interface.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dgemma.checks import read_device, read_dtype, require, typed
from dgemma.diffusion.prediction import Prediction, SoftCap
from dgemma.model.attention import Mask
from dgemma.model.backbone import KeysValues, Layer
from dgemma.model.cache import PrefixCache
from dgemma.model.config import Conventions, GenerationDefaults, ModelConfig
from dgemma.model.denoiser import Denoiser, require_vision
from dgemma.model.experts import Experts
from dgemma.model.inputs import check_cache, check_condition, check_ids, check_prefix, check_tokens
from dgemma.model.layers import GatedMLP, RMSNorm, rms_norm, wide_dtype
from dgemma.model.masks import canvas_mask, causal_mask
from dgemma.model.noise_level import NoiseLevelEmbedding
from dgemma.model.rotary import rotary_table
from dgemma.model.vision.images import Images
from dgemma.model.vision.places import find_blocks, insert_features, split_tokens
from dgemma.model.vision.tower import PatchEmbedder, VisionTower
from dgemma.quantization.memory import MemoryReport, report_memory
from dgemma.quantization.rounding import Quantization
from dgemma.quantization.weights import QuantizedWeight, quantized_weights

_MOST_ROWS = 1 << 20  # in a cache
_ENCODE_CHUNK = 1024  # tokens per chunk: memory grows with the length of a prompt, not with its square


class SelfConditioning(GatedMLP):
    """Adds the previous prediction, as a soft embedding, to the canvas's embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size)
        self.eps = config.rms_norm_eps
        self.pre_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedded: Tensor, signal: Tensor | None = None) -> Tensor:
        """Return norm(embedded + MLP(norm(signal))), all (B, C, D). None is a zero signal, whose MLP is zero."""
        if signal is not None:
            embedded = embedded + super().forward(self.pre_norm(signal))
        return rms_norm(embedded, None, self.eps)


class ModelFiles(NamedTuple):
    """The functions that load, save and publish a model. `dgemma.checkpoint` stands above this file and sets them."""

    load: Callable[..., Any]
    save: Callable[..., None]
    push: Callable[..., str]


def _no_files(*_: object, **__: object) -> NoReturn:
    raise ImportError("DiffusionGemma needs dgemma.checkpoint to load and save. Import dgemma.checkpoint first.")


class DiffusionGemma(nn.Module, Denoiser[PrefixCache]):
    """The denoiser: `encode` a prefix, `denoise` a canvas; `causal_logits` runs the same weights autoregressively.

    Example: `model = DiffusionGemma(dgemma.presets.tiny()); model.denoise(canvas, model.encode(prompt)).argmax`.
    """

    config: ModelConfig
    generation: GenerationDefaults
    has_causal_mode = shares_prefixes = True
    files: ClassVar[ModelFiles] = ModelFiles(_no_files, _no_files, _no_files)

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        conventions: Conventions | None = None,
    ) -> None:
        super().__init__()
        fix = "Pass dgemma.presets.tiny(), or use DiffusionGemma.from_pretrained(path)."
        require(isinstance(config, ModelConfig), "DiffusionGemma config", "be a ModelConfig", config, fix)
        fits = isinstance(conventions, Conventions | None)
        require(fits, "DiffusionGemma conventions", "be a Conventions", conventions)
        dtype = read_dtype("DiffusionGemma", dtype)
        self.config = config
        self.generation = GenerationDefaults()
        self.dequantized: dict[str, str] = {}  # names of decoded weights, and their formats in the files
        self.conventions = conventions or Conventions()
        self.takes_noise_level = self.takes_position_levels = config.noise_conditioning
        self.takes_images = config.vision is not None
        self.recompute_activations = False  # activation checkpointing: less memory, one more forward
        device = read_device("DiffusionGemma", device) if device is not None else torch.get_default_device()
        with torch.device("meta"):
            # Random initialisation on the meta device would import torch's compiler, which takes seconds.
            table = torch.empty(config.vocab_size, config.hidden_size)
            self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
            self.layers = nn.ModuleList(
                Layer(config, config.layer_shape(layer)) for layer in range(config.num_hidden_layers)
            )
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.self_conditioning = SelfConditioning(config)
            self.noise_level_embedding = NoiseLevelEmbedding(config.hidden_size) if config.noise_conditioning else None
            self.vision = None if config.vision is None else VisionTower(config.vision, config.hidden_size)
        self.to(dtype or torch.get_default_dtype())
        if device.type != "meta":
            self.to_empty(device=device)
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Set random weights: normal matrices and positions, unit norms and scalars."""
        for module in self.modules():
            if isinstance(module, QuantizedWeight):
                continue
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(std=self.config.initializer_range, generator=generator)
            elif isinstance(module, Experts | PatchEmbedder):
                for weight in module.parameters():
                    weight.normal_(std=self.config.initializer_range, generator=generator)
            else:
                for scale in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    scale.fill_(1.0)
            if isinstance(module, VisionTower) and module.std_bias is not None:
                module.std_bias.zero_()

    def forward(self, *args: object, **options: object) -> NoReturn:
        """Raise, because `encode` and `denoise` have no common forward."""
        raise TypeError(
            "DiffusionGemma has no forward. Read a prefix with encode(tokens), predict with denoise(canvas, cache). "
            "Write text with dgemma.generate(model, prompt_tokens)."
        )

    def __getattr__(self, name: str) -> Any:
        if name == "generate":
            raise AttributeError("DiffusionGemma has no method generate. Call dgemma.generate(model, prompt_tokens).")
        return super().__getattr__(name)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @typed
    def new_cache(self, batch_size: int) -> PrefixCache:
        """Return an empty prefix cache for `batch_size` rows."""
        fits = 0 <= batch_size <= _MOST_ROWS
        require(fits, "DiffusionGemma.new_cache batch_size", f"be in [0, {_MOST_ROWS:,}]", batch_size)
        return PrefixCache(self.config, batch_size, device=self.device, dtype=self.dtype, conventions=self.conventions)

    def encode(
        self,
        tokens: Tensor,
        cache: PrefixCache | None = None,
        attention_mask: Tensor | None = None,
        images: Images | None = None,
    ) -> PrefixCache:
        """Read tokens (B, P) causally into a prefix cache; a given cache is extended in place and returned.

        attention_mask (B, cached + P), or (B, P) for the new tokens alone, is 1 for real tokens and 0 for padding.
        Padding may be on either side. images: those of the image tokens, row after row. The tokens of an image see
        each other, in both directions.

        Example: `cache = model.encode(prompt_tokens)`.
        """
        cache = self._cache_for(tokens, cache)
        self._read(tokens, cache, attention_mask, images)
        return cache

    def causal_logits(
        self,
        tokens: Tensor,
        cache: PrefixCache | None = None,
        attention_mask: Tensor | None = None,
        images: Images | None = None,
    ) -> Tensor:
        """Return next-token logits, autoregressively: tokens (B, T) → (B, T, V) float32.

        A given cache is extended in place, as by `encode`. This is the autoregressive baseline.

        Example: `model.causal_logits(tokens)[:, -1].argmax(-1)` is the greedy next token.
        """
        return self._head(self._read(tokens, self._cache_for(tokens, cache), attention_mask, images)).logits

    def denoise(
        self,
        canvas: Tensor,
        cache: PrefixCache,
        self_cond: Prediction | Tensor | None = None,
        self_cond_mask: Tensor | None = None,
        noise_level: Tensor | None = None,
    ) -> Prediction:
        """Predict every position of canvas (B, C) at once, each seeing the prefix and the whole canvas.

        self_cond: the previous step's prediction, after temperature and truncation, or its logits (B, C, V). Rows with
        self_cond_mask (B,) False get a zero signal. noise_level, (B,) or (B, C), is for models with
        `config.noise_conditioning`; others, including the published one, ignore it. The cache is read, never changed.

        Example: `model.denoise(canvas, cache, self_cond=prediction.shaped(temperature=0.8)).entropy`.
        """
        check_tokens(self, canvas, check_cache(self.config, cache), "canvas")
        check_condition(self.config, canvas, self_cond, self_cond_mask)
        signal = None if self_cond is None else self.soft_embedding(self_cond, self_cond_mask)
        x = self.embed_canvas(canvas, signal, noise_level)
        positions = cache.lengths[:, None] + torch.arange(canvas.shape[1], device=canvas.device)
        # Every position sees the whole canvas, also in sliding layers, whose cache holds only what they see. So only
        # the empty slots of shorter rows need a mask.
        masks: list[Tensor | None] = [None] * len(cache.layers)
        if cache.ragged:
            masks = cache.by_kind(lambda layer: canvas_mask(cache, layer, canvas.shape[1]))
        x, _ = self.run(x, positions, cache.views(), masks, causal=False)
        return self._head(x)

    def _read(self, tokens: Tensor, cache: PrefixCache, attention_mask: Tensor | None, images: Images | None) -> Tensor:
        """Run tokens (B, T) causally in chunks, append keys and values, return the last hidden state (B, T, D)."""
        real = check_prefix(self, tokens, cache, attention_mask)
        cache.reserve(cache.num_slots + tokens.shape[1])
        embedded, image_index = self.embed_prompt(tokens, images)
        hidden = [embedded[:, :0]]
        for chunk in split_tokens(tokens.shape[1], _ENCODE_CHUNK, image_index):
            parts = (None if part is None else part[:, chunk] for part in (real, image_index))
            hidden.append(self._read_chunk(embedded[:, chunk], cache, *parts))
        return torch.cat(hidden, dim=1)

    def _read_chunk(self, x: Tensor, cache: PrefixCache, real: Tensor | None, image_index: Tensor | None) -> Tensor:
        counted = torch.ones(x.shape[:2], dtype=torch.int64, device=x.device) if real is None else real.long()
        positions = (cache.lengths[:, None] + counted.cumsum(1) - 1).clamp(min=0)
        masks = cache.by_kind(lambda layer: causal_mask(cache, layer, positions, real, image_index))
        x, new = self.run(x, positions, cache.views(), masks, causal=True)
        cache.append(new, real)
        return x

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        pasts: Sequence[KeysValues | None],
        masks: Sequence[Mask | None],
        *,
        causal: bool,
    ) -> tuple[Tensor, list[KeysValues]]:
        """Run x (B, T, D) at positions (B, T) through all layers and the last norm; also return new keys and values.

        `encode` and `denoise` share it. Call it to use another attention pattern.
        """
        shapes = [self.config.layer_shape(layer) for layer in range(self.config.num_hidden_layers)]
        kinds = {shape.kind: shape for shape in shapes}
        tables = {kind: rotary_table(shape, positions, x.dtype) for kind, shape in kinds.items()}
        new: list[KeysValues] = []
        for layer, shape, past, mask in zip(self.layers, shapes, pasts, masks, strict=True):
            inputs = (x, tables[shape.kind], past, mask, causal)
            if self.recompute_activations and torch.is_grad_enabled():
                # Layers draw no random numbers, so there is no RNG state to preserve.
                x, keys, values = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x, keys, values = layer(*inputs)
            new.append((keys, values))
        return self.norm(x), new

    def embed(self, tokens: Tensor) -> Tensor:
        """Return scaled embeddings: tokens (B, T) → (B, T, D)."""
        return self.embed_tokens(tokens) * self.embed_scale()

    def embed_prompt(self, tokens: Tensor, images: Images | None) -> tuple[Tensor, Tensor | None]:
        """Return embeddings (B, T, D) with the features of images, and the image of each token (see `find_blocks`)."""
        embedded = self.embed(tokens)
        if images is None:
            return embedded, None
        require_vision(self)
        assert self.vision is not None
        image_index = find_blocks(tokens, images, self.config.image_token_id)
        return insert_features(embedded, self.vision(images.to(self.device)), image_index), image_index

    def embed_canvas(self, canvas: Tensor, signal: Tensor | None = None, noise_level: Tensor | None = None) -> Tensor:
        """Return the layers' input for a canvas (B, C), a self-conditioning signal (B, C, D) and a level → (B, C, D).

        noise_level is (B,), or (B, C) for one level per position.
        """
        embedded = self.embed(canvas)
        if self.noise_level_embedding is not None:
            rule, fix = "be a tensor (B,) or (B, C)", "config.noise_conditioning is on, so the model needs it."
            require(noise_level is not None, "DiffusionGemma.denoise noise_level", rule, noise_level, fix)
            assert noise_level is not None
            level = self.noise_level_embedding(noise_level)
            embedded = embedded + (level[:, None] if noise_level.dim() == 1 else level)
        return self.self_conditioning(embedded, signal)

    def embed_scale(self) -> Tensor:
        """Return sqrt(hidden_size), rounded to the weights' dtype as in the published model."""
        return torch.full((), self.config.hidden_size**0.5, dtype=self.dtype, device=self.device)

    def soft_embedding(self, self_cond: Prediction | Tensor, self_cond_mask: Tensor | None = None) -> Tensor:
        """Return softmax(logits) @ embedding · sqrt(hidden): the expected embedding of a prediction, (B, C, D)."""
        parts = self_cond.pieces() if isinstance(self_cond, Prediction) else [self_cond]
        signal = torch.cat([self._expected_embedding(logits) for logits in parts], dim=1) * self.embed_scale()
        if self_cond_mask is not None:
            signal = signal * self_cond_mask.to(signal.dtype)[:, None, None]
        return signal

    def _expected_embedding(self, logits: Tensor) -> Tensor:
        if self.conventions.self_cond_logits == "rounded":
            logits = logits.to(self.dtype)
        return logits.softmax(-1, dtype=wide_dtype(logits)).to(self.dtype) @ self.embed_tokens.weight

    def _head(self, hidden: Tensor) -> Prediction:
        logits = F.linear(hidden, self.embed_tokens.weight)
        return Prediction(logits, (SoftCap(self.config.final_logit_softcapping),))

    def _cache_for(self, tokens: Tensor, cache: PrefixCache | None) -> PrefixCache:
        """Return the cache that `tokens` extend; a new one for None."""
        check_ids(tokens, "tokens")
        return self.new_cache(tokens.shape[0]) if cache is None else check_cache(self.config, cache)

    @classmethod
    @typed
    def from_pretrained(
        cls,
        path_or_repo: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        conventions: Conventions | None = None,
        quantization: Quantization | None = None,
        vision: bool = True,
    ) -> Self:
        """Load a checkpoint folder or hub id, without pickle or remote code.

        dtype None keeps the stored dtype, but gives float32 for checkpoints that ship with dgemma.

        Quantised checkpoints keep their format. `quantization` quantises other checkpoints as they are read. Without
        `vision`, the model reads no images and leaves out the tower (1.15 GB of the published checkpoint).

        Example: `DiffusionGemma.from_pretrained("google/diffusiongemma-26B-A4B-it", device="cuda")`.
        """
        how = {"conventions": conventions, "quantization": quantization, "vision": vision}
        return cls.files.load(cls, path_or_repo, dtype=dtype, device=device, **how)

    @typed
    def save_pretrained(self, path: str | Path, *, max_shard_size: int | str = "5GB") -> None:
        """Write a checkpoint folder that transformers loads as DiffusionGemmaForBlockDiffusion, with its tokenizer."""
        self.files.save(self, path, max_shard_size=max_shard_size)

    @typed
    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        commit_message: str = "Upload with dgemma",
    ) -> str:
        """Upload what `save_pretrained` writes to the Hugging Face hub, and return the address.

        The repository is made if needed, and gets a model card unless it has one. Without `token`, that of `hf auth
        login` is used.

        Example: `model.push_to_hub("me/my-model", private=True)`.
        """
        return self.files.push(self, repo_id, private=private, token=token, message=commit_message)

    def num_parameters(self, *, active: bool = False) -> int:
        """Return the number of weights; with `active`, only those that one token uses (its chosen experts).

        Example: `model.num_parameters(active=True)` is 3.8e9 of 25.8e9 for the published model.
        """
        total, experts = _num_weights(self), sum(_num_weights(m) for m in self.modules() if isinstance(m, Experts))
        idle = experts * (self.config.num_experts - self.config.top_k_experts) // self.config.num_experts
        idle += 0 if self.vision is None else _num_weights(self.vision)  # text does not run it
        return total - idle if active else total

    def memory_report(self) -> MemoryReport:
        """Return the format and the bytes of each part of the weights. Printed, the report is a table.

        Example: `print(model.memory_report())`.
        """
        return report_memory(self, self.dequantized)


def _num_weights(module: nn.Module) -> int:
    quantized = sum(weight.shape.numel() for _, weight in quantized_weights(module))
    return sum(p.numel() for p in module.parameters()) + quantized
