"""A run: arguments become a plan, and the plan is carried out canvas by canvas. Start with `generate.py`.

A block is the number of a canvas in its run, and also the tokens of that canvas once it is finished. The calls of a run
are run_plan (loop.py) → denoise_canvas (loop.py) → Denoising.step (denoising.py) → step (step.py).
"""
