"""Time to read images at the published size: parity first, then time.

python kernels/benchmarks/images.py                    images of 280 tokens, one and a batch of 8
python kernels/benchmarks/images.py --transformers     also transformers' tower and encoder, in the same run
python kernels/benchmarks/images.py --profile          the time of each kernel of one image

The time beyond the text is that of a prompt with an image, minus that of a text of the same length, or minus that of
the text around the image alone. Weights are random. The goal is 15 ms for an image of 280 tokens. transformers is timed
even if its features differ, and a difference then ends the run with an error.
"""

import argparse
import copy
import gc
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from generate import calm
from timing import demand_parity, describe_run, relative_error
from transformers_step import build

import dgemma
from dgemma.model.layers import rms_norm
from dgemma.model.vision.images import Images
from dgemma.model.vision.tower import VisionTower
from dgemma_kernels import accelerate
from dgemma_kernels.engine.graphs import GraphMemory
from dgemma_kernels.engine.vision import FusedTower

GRID = (60, 42)  # columns and rows of patches: 280 tokens, the budget
GOAL = 15.0  # ms
SIZES = (1, 8)  # images of a batch
TEXT = 64  # tokens of text after an image
LIMIT = 1e-3  # of the relative difference from transformers' features, in float32


def random_images(count: int, patch_dim: int) -> Images:
    generator = torch.Generator().manual_seed(0)
    return Images(
        torch.randint(256, (count * GRID[0] * GRID[1], patch_dim), generator=generator).byte(), (GRID,) * count
    )


def prompt(config: dgemma.ModelConfig, batch_size: int, *, with_image: bool) -> torch.Tensor:
    """Return prompts (B, P) of equal length, with an image of 280 tokens in each row or without."""
    num_tokens = GRID[0] * GRID[1] // 9
    tokens = torch.randint(
        1000, 200_000, (batch_size, 2 + num_tokens + TEXT), generator=torch.Generator().manual_seed(1)
    )
    if with_image:
        tokens[:, 1 : 1 + num_tokens] = config.image_token_id
    return tokens.cuda()


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time of a call, from its start on the host to its end on the device."""
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[3:])


def their_inputs(images: Images) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels (I, L, patch_dim) and positions (I, L, 2) for transformers, on the GPU.

    Pixels stay in float32, as its processor returns them: bfloat16 would move most of those above 0.5 up, and
    attention over thousands of patches averages noise away, but not a shift that they share.
    """
    pixels = images.patches.view(len(images), -1, images.patches.shape[1]).cuda().float() / 255
    return pixels, images.positions.view(len(images), -1, 2).cuda()


def time_ours(config: dgemma.ModelConfig, *, profiled: bool) -> tuple[VisionTower, dict[int, float]]:
    """Compare and time the model. Return the plain tower and, by batch size, the milliseconds beyond the text.

    The rest of the model is freed.
    """
    model = calm(dgemma.DiffusionGemma(config, device="cuda", dtype=torch.bfloat16))
    fast, plain = accelerate(model), model.vision
    assert plain is not None
    tower = FusedTower(plain, GraphMemory(model.device))

    images = random_images(1, plain.config.patch_dim)
    wide = copy.deepcopy(plain).float()(images.to("cuda"))
    rounding = relative_error(plain(images.to("cuda")), wide)
    error = demand_parity("features", tower(images), wide, 1.5 * rounding)
    print(f"features differ from those in float32 by {error:.2e}, the plain tower's by {rounding:.2e}")
    errors = []
    for shown in (None, images):
        tokens = prompt(config, 1, with_image=shown is not None)
        got, want = (network.causal_logits(tokens, images=shown) for network in (fast, model))
        errors.append(relative_error(got, want))
    print(f"logits differ from the plain model's by {errors[0]:.2e} for text, {errors[1]:.2e} with an image")
    if not errors[1] <= min(2 * errors[0], 0.5):  # unrelated logits differ by 1.4
        raise SystemExit("PARITY FAILED, nothing timed: images differ more than text.")

    beyond = {}
    for size in SIZES:
        images = random_images(size, plain.config.patch_dim)
        text, seen = (prompt(config, size, with_image=flag) for flag in (False, True))
        of_text, of_rest = (milliseconds(partial(fast.encode, tokens)) for tokens in (text, text[:, -TEXT - 2 :]))
        of_image = milliseconds(partial(fast.encode, seen, images=images))
        towers = [milliseconds(partial(run, images.to(to)), 5) for run, to in ((tower, "cpu"), (plain, "cuda"))]
        beyond[size] = of_image - of_text
        print(f"batch {size}: text {of_text:.2f} ms, without image tokens {of_rest:.2f}, with images {of_image:.2f}")
        print(f"  the tower {towers[0]:.2f} ms, the plain one {towers[1]:.2f} ms")
        print(f"  beyond the text {beyond[size]:.2f} ms, beyond the text alone {of_image - of_rest:.2f} ms")
        print(f"  {1000 * size / of_image:.1f} images per second")
        if size == 1:
            print(f"  the goal of {GOAL} ms is {'met' if beyond[size] <= GOAL else 'missed'}", flush=True)
    if profiled:
        images, seen = random_images(1, plain.config.patch_dim), prompt(config, 1, with_image=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            fast.encode(seen, images=images)
            torch.cuda.synchronize()
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60))
    return plain, beyond


def compare_theirs(their_tower: Any, plain: VisionTower) -> float:
    """Give transformers' tower our weights and return the difference of the features, both in float32."""
    weights = {
        f"encoder.{name.replace('_proj.weight', '_proj.linear.weight')}" if name.startswith("layers.") else name: weight
        for name, weight in plain.state_dict().items()
        if not name.startswith("embedding_projection.")
    }
    their_tower.load_state_dict(weights)
    images = random_images(1, plain.config.patch_dim)
    inputs = their_inputs(images)

    def features(network: Any, ours: VisionTower) -> torch.Tensor:
        pooled = rms_norm(network(*inputs).last_hidden_state, None, ours.config.rms_norm_eps)
        return ours.embedding_projection(pooled)

    wide = copy.deepcopy(plain).float()
    want = wide(images.to("cuda"))
    error = relative_error(features(copy.deepcopy(their_tower).float(), wide), want)
    rounding = relative_error(features(their_tower, plain), want)
    print(f"features differ from transformers' by {error:.2e}, both in float32", flush=True)
    print(f"its features in bfloat16 differ from those in float32 by {rounding:.2e}", flush=True)
    return error


def time_theirs(config: dgemma.ModelConfig, plain: VisionTower, beyond: dict[int, float]) -> None:
    """Compare transformers' tower with ours, and time it and the encoder."""
    theirs: Any = build(config, "cuda")
    encoder = theirs.model.encoder
    error = compare_theirs(encoder.vision_tower, plain)
    for size in SIZES:
        pixels, positions = their_inputs(random_images(size, plain.config.patch_dim))
        text, seen = (prompt(config, size, with_image=flag) for flag in (False, True))
        inputs = {"input_ids": seen, "mm_token_type_ids": (seen == config.image_token_id).long()}
        of_tower = milliseconds(partial(encoder.vision_tower, pixels, positions), 5)
        print(f"transformers, batch {size}: the tower {of_tower:.2f} ms", flush=True)
        of_text = milliseconds(partial(encoder, input_ids=text), 5)
        of_image = milliseconds(partial(encoder, **inputs, pixel_values=pixels, image_position_ids=positions), 5)
        print(f"  text {of_text:.2f} ms, with images {of_image:.2f} ms, {1000 * size / of_image:.1f} images per second")
        per_image = [time / size for time in (of_image - of_text, beyond[size])]
        print(f"  beyond the text {per_image[0]:.2f} ms per image, ours {per_image[1]:.2f} ms", flush=True)
    if not error <= LIMIT:
        raise SystemExit(f"PARITY FAILED: features in float32 are off by {error:.3e}, the limit is {LIMIT:.1e}.")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="use only the last layers of the text model")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    print(describe_run())
    config = dgemma.presets.diffusiongemma_26b_a4b()
    if arguments.layers is not None:
        kinds = config.layer_types[-arguments.layers :]
        config = config.replace(num_hidden_layers=len(kinds), layer_types=kinds)
    plain, beyond = time_ours(config, profiled=arguments.profile)
    if arguments.transformers:
        gc.collect()
        torch.cuda.empty_cache()
        time_theirs(config, plain, beyond)


if __name__ == "__main__":
    main()
