"""Run the denoiser in Triton kernels and CUDA graphs. `generate` takes it in place of the reference model.

    python examples/14_kernels.py

With a GPU, the script times a random model, whose heads have the published size, with and without kernels. Without a
GPU, it runs a smaller model in Triton's interpreter for half a minute. Both denoisers share their weights. On a GPU the
first run compiles for some seconds; the second shows the speed.
"""

import os
import time

import torch

import dgemma
from dgemma.model.config import FULL, SLIDING

on_gpu = torch.cuda.is_available()
if not on_gpu:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
from dgemma_kernels import accelerate  # noqa: E402

if on_gpu:
    device, dtype, prompt_len, new_tokens, steps = "cuda", torch.bfloat16, 512, 512, 16
    config = dgemma.presets.small().replace(
        head_dim=256, global_head_dim=512, hidden_size=512, moe_intermediate_size=256, vocab_size=32_768
    )
else:
    device, dtype, prompt_len, new_tokens, steps = (
        "cpu",
        torch.float32,
        3,
        4,
        2,
    )  # no bfloat16 in the interpreter
    config = dgemma.presets.tiny().replace(
        vocab_size=64, canvas_length=4, num_experts=4, num_hidden_layers=2, layer_types=(SLIDING, FULL)
    )
    print("torch finds no GPU. A small model runs in Triton's interpreter; ignore its times.", flush=True)

torch.manual_seed(0)
model = dgemma.DiffusionGemma(config, device=device, dtype=dtype)
fast = accelerate(model)
prompt = torch.randint(config.vocab_size, (1, prompt_len), device=device)
written = {}
for name, denoiser in (("reference", model), ("kernels", fast)):
    for attempt in ("first", "second") if on_gpu else ("only",):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        out = dgemma.generate(denoiser, prompt, max_new_tokens=new_tokens, steps=steps, stop=None, eos_token_ids=())
        written[name] = out.new_tokens.tolist()  # waits for the device
        seconds = time.perf_counter() - start
        print(f"{name:9} {attempt:6} run: {seconds:6.2f} s, {out.new_tokens.numel() / seconds:8.0f} tokens/s")
same = sum(a == b for a, b in zip(written["reference"][0], written["kernels"][0], strict=True))
print(f"{same} of {new_tokens} tokens are the same" + (" (bfloat16 rounds differently in the two)" if on_gpu else ""))
