"""Text generation: denoise one canvas after another. Read this file first.

    stage                                  where                            shape in → out
    1 text → tokens                        checkpoint/tokenizer.py          str → (B, P)
    2 read the prefix                      encode, model/diffusion.py       (B, P) → cache
    3 a canvas of noise                    start_state, step.py             → (B, C)
    4 predict every position at once       predict, step.py                 (B, C) and cache → Prediction
    5 decide                               decide, step.py; sampling/       Prediction and state → Decision
    6 write, refill with noise, stop?      settle, step.py                  → next canvas (B, C), done (B,)
    7 commit the block; back to 3          run_plan, loop.py                the cache grows by C
    8 tokens → text                        checkpoint/tokenizer.py          (B, N) → str

`diffusion/__init__.py` explains the words. `generate` turns its arguments into a plan (plan.py) and runs the loop over
blocks (`run_plan`, loop.py). rows.py keeps what the rows have written. Each iteration of the inner loop
(`denoise_canvas`, loop.py) is one step (denoising.py, step.py). `record=True` keeps every step in a trajectory, which
can be replayed and forked (recorded/trajectory.py).
"""

from collections.abc import Generator
from typing import Unpack

from torch import Tensor

from dgemma.model.cache import Cache
from dgemma.model.denoiser import Denoiser
from dgemma.printing import progress_bar
from dgemma.run.changes import Changes
from dgemma.run.loop import drain, run_plan
from dgemma.run.options import GenerateOptions, RunOptions, WatchOptions, fill_in, select, takes_options
from dgemma.run.plan import read_plan
from dgemma.run.recorded.trajectory import Generation, Trajectory
from dgemma.run.records import BlockCommit, Events, StepRecord, shows_progress


@takes_options(GenerateOptions)
def generate(
    model: Denoiser, prompt_tokens: Tensor, *, cache: Cache | None = None, **options: Unpack[GenerateOptions]
) -> Generation:
    """Generate up to `max_new_tokens` tokens after prompt_tokens (B, P), canvas by canvas.

    Arguments you omit come from the checkpoint; options.py has the types and the defaults.

    - `max_new_tokens` is rounded up to whole canvases; `steps` is the maximum number of steps per canvas.
    - `noise` is the corruption process, and `sampler` decides which tokens are written.
    - `temperature` (a schedule or a number), `top_k` and `top_p` shape every prediction.
    - `stop` is the rule that ends a canvas early; None disables it. By default, LeaveOneOutGibbs runs without it,
      because it still corrects tokens when all predictions are confident.
    - `seed`: an int s gives row i the seed s + i.
    - `cache`: a prefix that is already encoded; prompt_tokens are then only the new tokens. The cache is extended in
      place until a row stops; from then on the run extends a copy. So continue with the `cache` of the result.
    - `attention_mask` (B, P): 1 for real tokens, 0 for padding.
    - `images`: those of the prompt, in the order of their tokens; for a batch, also a list with the images of each row.
    - `canvas` (B, N): tokens to start from. Positions with -1 and positions after N start as noise.
    - `frozen` (B, N) bool: positions of `canvas` that never change.
    - `noise_level`: how noisy `canvas` is, in (0, 1]; the run starts at the nearest step.
    - `allowed`: the tokens that may be written. It is boolean and broadcastable to (B, N, V), a list of ids for all
      positions, or one list per position.
    - `constraint`: the language of the text up to its stop token, such as `Regex(pattern, tokenizer)` or `JsonSchema`;
      one for all rows, or a list with one or None per row. Every prediction is conditioned on it. The text ends within
      `max_new_tokens` if one of the language can.
    - `eos_token_ids`: stop tokens. A stop token ends its row, unless a frozen position follows. The rest of the row is
      padding and takes no forwards.
    - `on_step(record)` gets every `StepRecord`. It may return a changed `record.state`, or a dictionary of fields of
      the state and of `Knobs`. Changed knobs apply to the rest of the run, a changed state to the rest of its canvas.
      A changed temperature or noise level lasts for one step.
    - `record` keeps a `Trajectory`, with the `record_top` best candidates of every position (None: 5).
    - `progress` shows a progress bar for long runs, in terminals and notebooks only.

    Example: `dgemma.generate(model, prompt_tokens, max_new_tokens=64, seed=1).new_tokens`.
    """
    watch = fill_in(options, WatchOptions)
    plan = read_plan(model, prompt_tokens, cache=cache, **select(options, RunOptions))
    events, trajectory = run_plan(model, plan, cache), None
    if watch["record"]:
        trajectory = Trajectory(plan, top=watch["record_top"])
        events = trajectory.record(events, may_change=watch["on_step"] is not None)
    show = watch["progress"] and not shows_progress(watch["on_step"])
    with progress_bar(desc="denoising", unit="step", show=show) as bar:
        output = drain(events, on_step=watch["on_step"], bar=bar)
    return Generation(**vars(output), recorded=trajectory)


@takes_options(RunOptions)
def stream(
    model: Denoiser, prompt_tokens: Tensor, *, cache: Cache | None = None, **options: Unpack[RunOptions]
) -> Generator[StepRecord | BlockCommit, Changes, Generation]:
    """Run `generate` as a generator: yield a `StepRecord` after every step and a `BlockCommit` after every block.

    It takes the options of `generate` and returns the same result. Send a changed state, or a dictionary of changes,
    after a `StepRecord` to change the next step.

    Example: `for event in stream(model, prompt): print(event.state.draft if isinstance(event, StepRecord) else "|")`.
    """
    return _finish(run_plan(model, read_plan(model, prompt_tokens, cache=cache, **options), cache))


def _finish(events: Events) -> Generator[StepRecord | BlockCommit, Changes, Generation]:
    output = yield from events
    return Generation(**vars(output), recorded=None)
