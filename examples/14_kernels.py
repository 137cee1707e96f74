"""Use the kernels: the same denoiser as Triton kernels and CUDA graphs. `generate` cannot tell it from the reference.

Needs an NVIDIA GPU; without one this says so. The weights are shared, never copied. The first run compiles for some
seconds, the second shows the speed. The model is a random one with heads of the published size.
"""

import time

import torch

import dgemma


def main() -> None:
    if not torch.cuda.is_available():
        print("There is no GPU that torch can see; with one, this is what runs:\n")
        print("    from dgemma_kernels import accelerate")
        print("    fast = accelerate(model)            # bfloat16 weights, shared with the model")
        print("    dgemma.generate(fast, prompt, ...)  # any sampler, noise and stop rule")
        return
    from dgemma_kernels import accelerate

    config = dgemma.presets.small().replace(
        head_dim=256, global_head_dim=512, hidden_size=512, moe_intermediate_size=256, vocab_size=32_768
    )
    torch.manual_seed(0)
    model = dgemma.DiffusionGemma(config, device="cuda", dtype=torch.bfloat16)
    fast = accelerate(model)
    prompt = torch.randint(config.vocab_size, (1, 512), device="cuda")
    for name, denoiser in (("reference", model), ("kernels", fast)):
        for attempt in ("first", "second"):
            torch.cuda.synchronize()
            start = time.perf_counter()
            out = dgemma.generate(denoiser, prompt, max_new_tokens=512, steps=16, stop=None, eos_token_ids=())
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            print(f"{name:9} {attempt:6} run: {seconds:6.2f} s, {out.new_tokens.numel() / seconds:8.0f} tokens/s")


if __name__ == "__main__":
    main()
