"""A model for tests of the server that writes only lowercase letters, and what `generate` writes with it."""

import torch

import dgemma
from rowwise import RowwiseDenoiser

TOKENIZER = dgemma.ByteTokenizer()
CONFIG = dgemma.presets.tiny().replace(vocab_size=384, canvas_length=16, max_position_embeddings=320)


class Letters(RowwiseDenoiser):
    """Writes lowercase letters, with other tokens too improbable to be drawn."""

    def denoise(self, canvas, cache, self_cond=None):
        logits = super().denoise(canvas, cache, self_cond).logits
        a = TOKENIZER.encode("a", bos=False)[0]
        is_letter = (torch.arange(384) >= a) & (torch.arange(384) < a + 26)
        return dgemma.Prediction(logits - 100 * ~is_letter)


def letters(**settings):
    """Return the model, with some defaults of `generate`."""
    defaults = {"eos_token_id": (1,), "max_new_tokens": 32, "max_denoising_steps": 3} | settings
    return Letters(CONFIG, dgemma.GenerationDefaults(**defaults))


def expected(model, prompt, seed=0, **options):
    """Return what `generate` writes after a prompt, as text."""
    out = dgemma.generate(model, torch.tensor([prompt]), seed=[seed], **options)
    return TOKENIZER.decode(out.new_tokens[0])
