"""A fresh model's attention begins spread out."""

import torch

import dgemma
from dgemma.train.initial import soften_attention


def test_softened_scores_have_unit_spread_where_fresh_ones_have_the_root_of_the_head_size():
    config = dgemma.presets.tiny().replace(head_dim=64, global_head_dim=64)
    torch.manual_seed(0)
    model = dgemma.DiffusionGemma(config)
    tokens = torch.randint(config.vocab_size, (4, 64))

    def spread() -> float:
        # Of log-weights within a row: what softmax was given, up to a constant of the row.
        with dgemma.observe(model, attention=[2], prefix=True) as seen:
            model.encode(tokens)
        last_rows = seen.passes[0].attention[2][:, :, -1].clamp(min=1e-30).log()
        return last_rows.std(-1).mean().item()

    fresh = spread()
    soften_attention(model)
    # Queries and keys of 64 normed entries are at angles whose products spread by sqrt(64) = 8.
    assert 4 < fresh < 16
    assert 0.5 < spread() < 2
