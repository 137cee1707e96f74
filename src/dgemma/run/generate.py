"""The spine: text emerges from noise, canvas by canvas. Read this file first.

    stage                                  where                            shape in → out
    1 text → tokens                        checkpoint/tokenizer.py          str → (B, P)
    2 read the prefix                      encode, model/diffusion.py       (B, P) → cache
    3 a canvas of noise                    start_state, step.py             → (B, C)
    4 predict every position at once       predict, step.py                 (B, C) and cache → Prediction
    5 decide                               decide, step.py; sampling/       Prediction and state → Decision
    6 write, refill with noise, stop?      settle, step.py                  → next canvas (B, C), done (B,)
    7 commit the block; back to 3          run_plan, loop.py                the cache grows by C
    8 tokens → text                        checkpoint/tokenizer.py          (B, N) → str

`generate` reads its arguments into a plan (plan.py) and drains the loop over blocks (loop.py). Each pass of the inner
loop is one step (step.py), and `record=True` keeps every step in a trajectory (trajectory.py).
"""

from typing import Unpack

from torch import Tensor

from dgemma.model.cache import Cache
from dgemma.run.loop import run_plan
from dgemma.run.options import RunOptions, takes_options
from dgemma.run.plan import read_plan
from dgemma.run.records import Events, OnStep
from dgemma.run.step import Denoiser
from dgemma.run.trajectory import Generation, Trajectory, drain


@takes_options(RunOptions)
def generate(
    model: Denoiser,
    prompt_tokens: Tensor,
    *,
    cache: Cache | None = None,
    on_step: OnStep | None = None,
    record: bool = False,
    record_top: int = 5,
    progress: bool = True,
    **options: Unpack[RunOptions],
) -> Generation:
    """Write up to `max_new_tokens` after prompt_tokens (B, P), canvas by canvas.

    max_new_tokens rounds up to whole canvases. `steps` caps the forwards per canvas. `noise` is the process, `sampler`
    decides what is kept, `temperature` (a schedule or a number), `top_k` and `top_p` shape every prediction, `stop`
    ends a canvas early (None: never). What is left out is the checkpoint's own, which for the published model means
    256 tokens, 48 steps, UniformNoise, EntropyBound(bound=0.1), temperature 0.8 → 0.4, StableAndConfident; that rule
    waits for certain predictions, so a sampler that doubts them (LeaveOneOutGibbs) runs without it.

    An int `seed` s gives row i the seed s + i. With `cache`, prompt_tokens are only what is new. `canvas` (B, N) starts
    from tokens of yours (-1, and whatever lies past N: noise), `frozen` (B, N) bool pins some of them, `allowed`
    restricts tokens: boolean, broadcastable to (B, N, V), a list of ids for all positions, or one list per position.
    Rows that write a stop token (`eos_token_ids`) are padded after it and cost nothing more; before a row's last pin
    nothing stops it. A given cache is extended in place until a row stops; `out.cache` is the one to go on with.

    `on_step(record)` sees every `StepRecord` and may return a changed `record.state`, or a dictionary of changes: any
    field of the state, any of `Knobs`. Knobs keep their change, a state's ends with its canvas. `record=True` keeps a
    `Trajectory`, with the `record_top` best candidates of every position. A progress bar shows on terminals when runs
    are long.

    Example: `dgemma.generate(model, prompt_tokens, max_new_tokens=64, seed=1).new_tokens`.
    """
    plan = read_plan(model, prompt_tokens, cache=cache, **options)
    trajectory = Trajectory(plan, top=record_top) if record else None
    return drain(run_plan(model, plan, cache), on_step=on_step, trajectory=trajectory, progress=progress)


@takes_options(RunOptions)
def stream(
    model: Denoiser, prompt_tokens: Tensor, *, cache: Cache | None = None, **options: Unpack[RunOptions]
) -> Events:
    """`generate` as a stream: yields a `StepRecord` after every step and a `BlockCommit` after every block.

    For any batch size. Arguments as for `generate`, whose result is the generator's return value. Whatever is sent in
    after a `StepRecord` (a changed state, or a dictionary of changes) holds from the next step on.

    Example: `for event in stream(model, prompt): print(event.state.draft if isinstance(event, StepRecord) else "|")`.
    """
    return run_plan(model, read_plan(model, prompt_tokens, cache=cache, **options), cache)
