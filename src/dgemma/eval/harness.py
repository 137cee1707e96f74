"""dgemma as a model for lm-evaluation-harness, under the name `dgemma` in its registry.

The harness (0.4.13) has no entry point for models of other packages. So `python -m dgemma.eval` registers this one and
then runs the harness's own command; in Python, importing this module is enough.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch

from dgemma.checkpoint.identity import fingerprint
from dgemma.checkpoint.loading import lay_out_by_column
from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.checks import Count, as_int, at_least, require, typed
from dgemma.data.sudoku.encoding import load_tokenizer
from dgemma.files import check_writable, write_text, writing
from dgemma.intervals import Estimate, mean_of
from dgemma.location import resolve
from dgemma.many.prompts import generate_many
from dgemma.model.denoiser import Denoiser, check_denoiser
from dgemma.model.diffusion import DiffusionGemma
from dgemma.printing import install_command, progress_bar
from dgemma.run.options import learnt_noise
from dgemma.run.plan import read_plan
from dgemma.sampling.base import Sampler
from dgemma.sampling.named import parse_sampler
from dgemma.train.batch import TrainBatch, row_seeds
from dgemma.train.canvases import cut_canvases
from dgemma.train.likelihood import evaluate
from dgemma.train.predictors import read_canvases
from dgemma.values import label

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        f"dgemma.eval needs lm-evaluation-harness ({error}). Install it with: {install_command('eval')}"
    ) from None

logger = logging.getLogger("dgemma")

_COPIES = 8  # rows of independent noise per request; they give the interval of its bound
_CHUNK = 256  # requests that are measured together


class Pair(NamedTuple):
    """A context and the continuation to score, as tokens."""

    context: list[int]
    continuation: list[int]


class Score(NamedTuple):
    """The log-likelihood of a continuation in nats: its lower bound with an interval, and its causal value.

    A value that was not measured is None. For a continuation without tokens, both values are None.
    """

    bound: Estimate | None
    causal: float | None
    is_greedy: bool

    @property
    def value(self) -> float:
        """The number that the harness gets: the bound, otherwise the causal likelihood, otherwise log(1)."""
        return (self.causal or 0.0) if self.bound is None else self.bound.value


@register_model("dgemma")
class DiffusionLM(TemplateLM):
    """A checkpoint of dgemma, or any `Denoiser`, as a model of the harness.

    Write the arguments as `--model_args name=value,...`. The defaults of `sampler`, `steps`, `temperature` and
    `max_gen_toks` come from the checkpoint.

    - `pretrained`: a checkpoint folder or hub id; in Python also a `Denoiser`, with its `tokenizer`.
    - `sampler`: as on the command line, but with `;` between fields, such as `threshold:tau=0.8;greedy=True`.
    - `steps`, `temperature`: as in `generate`. A task that samples at a temperature above 0 overrides `temperature`.
    - `thinking`: ask for a thought before the answer, in tasks with a chat template. The thought is not scored.
    - `likelihood`: "bound" scores texts by the diffusion bound, "causal" autoregressively. "both" measures both and
      scores by the bound.
    - `num_samples`: noise levels per canvas for the bound, at least 8.
    - `check_greedy`: also test whether the model itself would write the continuation; slow, and few tasks read it.
    - `max_length`: limit for context and continuation together; only the context is cut.
    - `max_gen_toks`: new tokens if the task sets no limit.
    - `seed`: the seed of all noise; None takes torch's seed, which the harness sets with `--seed`.
    - `details`: a file that gets a JSON line per request: its scores and intervals, or its steps and seed.

    Example: `lm_eval.simple_evaluate(DiffusionLM("dgemma/text", likelihood="causal"), tasks=["lambada_openai"])`.
    """

    @typed
    def __init__(
        self,
        pretrained: str | Path | Denoiser,
        *,
        tokenizer: Tokenizer | None = None,
        sampler: str | None = None,
        steps: int | None = None,
        temperature: float | None = None,
        thinking: bool = False,
        likelihood: Literal["bound", "causal", "both"] = "bound",
        num_samples: Annotated[int, at_least(_COPIES)] = 32,
        check_greedy: bool = False,
        max_length: Annotated[int, at_least(2)] = 2048,
        max_gen_toks: Count | None = None,
        seed: int | None = None,
        details: str | Path | None = None,
        batch_size: int | str = 8,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        rows = as_int(int(batch_size) if isinstance(batch_size, str) and batch_size.isdigit() else batch_size)
        if rows is None or rows < 1:
            raise ValueError(f"batch_size must be a number of at least 1, got {batch_size!r}. Use --batch_size 8.")
        self._name, self._revision = type(pretrained).__name__, "unknown"
        if isinstance(pretrained, str | Path):
            self._name, folder = str(pretrained), resolve(pretrained)
            # The harness passes cuda:0 by default.
            where = (device or "cuda") if torch.cuda.is_available() else "cpu"
            pretrained = DiffusionGemma.from_pretrained(pretrained, dtype=dtype, device=where).eval()
            if pretrained.device.type == "cpu":
                lay_out_by_column(pretrained)
            tokenizer = tokenizer or load_tokenizer(self._name, pretrained.config)
            is_commit = folder.parent.name == "snapshots"  # the hub's cache names folders after commits
            self._revision = folder.name if is_commit else f"weights:{fingerprint(pretrained)}"
        check_denoiser("DiffusionLM", pretrained)
        if tokenizer is None:
            raise ValueError("DiffusionLM tokenizer must be set for a denoiser, got None. Pass its tokenizer.")
        self.model: Denoiser = pretrained
        self.tokens = tokenizer
        # Scalars of NumPy and torch cannot be stored with the results as JSON.
        self.thinking, self.likelihood_mode, self.num_samples = bool(thinking), likelihood, num_samples
        self.check_greedy, self.batch_rows = bool(check_greedy), rows
        rule = f"be 'bound' for a {type(self.model).__name__}, which has no causal mode"
        require(likelihood == "bound" or self.model.has_causal_mode, "likelihood", rule, likelihood)
        config = self.model.config
        self.max_length = min(max_length, config.max_position_embeddings - config.canvas_length)
        self.max_gen_toks = self.model.generation.max_new_tokens if max_gen_toks is None else int(max_gen_toks)
        self.seed = torch.initial_seed() % 2**31 if seed is None else int(seed)
        self.settings: dict[str, Any] = {} if steps is None else {"steps": int(steps)}
        self.settings |= {} if temperature is None else {"temperature": float(temperature)}
        self.settings |= {} if sampler is None else {"sampler": _read_sampler(sampler)}
        prompt = torch.ones(1, 1, dtype=torch.int64, device=self.model.device)
        self._plan = read_plan(self.model, prompt, **self.settings)
        self._details_path, self._details = details, list[dict[str, Any]]()
        if details is not None:
            with writing(details):  # an error is raised before the first task
                check_writable(details)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def eot_token_id(self) -> int:
        return self.tokens.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self.tokens.bos_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text; begin-of-text comes first unless the text has it."""
        ids = self.tokens.encode(string, bos=False)
        with_bos = add_special_tokens is not False and ids[:1] != [self.tokens.bos_token_id]
        return [*self.tokens.encode("", bos=True), *ids] if with_bos else ids

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return a rendered user turn, which the harness stores with the results."""
        return self.apply_chat_template([{"role": "user", "content": "…"}]) if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat by the checkpoint's template. Without a generation prompt, the last turn is left open."""
        turns = chat_history if add_generation_prompt else chat_history[:-1]
        text = self.tokens.decode(self.tokens.chat(turns, thinking=self.thinking), skip_special=False)
        return text if add_generation_prompt else text + chat_history[-1]["content"]

    def get_model_info(self) -> dict[str, Any]:
        """Return `protocol()` and the means of the results so far. The harness stores them under "config"."""
        info = {"dgemma": {**self.protocol(), "measured": self.measured()}}
        logger.info("protocol: %s", json.dumps(info["dgemma"]))
        return info

    def protocol(self) -> dict[str, Any]:
        """Return everything that the scores depend on, as plain Python.

        Example: `DiffusionLM("dgemma/text").protocol()["likelihood"]` is "bound".
        """
        knobs = self._plan.knobs
        return {
            "model": self._name,
            "revision": self._revision,
            "dgemma": version("dgemma"),
            "dtype": str(getattr(self.model, "dtype", None)),
            "noise": label(self._plan.noise),
            "sampler": label(knobs.sampler),
            "steps": self._plan.num_steps,
            "temperature": label(knobs.temperature),
            "stop": label(knobs.stop),
            "canvas_length": self.model.config.canvas_length,
            "thinking": self.thinking,
            "likelihood": self.likelihood_mode,
            "num_samples": self.num_samples,
            "max_length": self.max_length,
            "seed": self.seed,
        }

    def measured(self) -> dict[str, float | int]:
        """Return means over the requests so far: tokens per forward, steps, and the half-width of the intervals."""
        written = [entry for entry in self._details if "steps" in entry]
        bounds = [entry["bound_error"] for entry in self._details if entry.get("bound_error") is not None]
        found: dict[str, float | int] = {"requests": len(self._details)}
        if written:
            num_steps = sum(sum(entry["steps"]) for entry in written)
            found["tokens_per_forward"] = sum(entry["tokens"] for entry in written) / num_steps
            found["steps_per_request"] = num_steps / len(written)
        if bounds:
            found["mean_bound_error"] = sum(bounds) / len(bounds)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Write an answer to each context, up to the task's stop strings. Request i has the seed `seed` + i."""
        texts = [""] * len(requests)
        groups: dict[tuple[tuple[str, Any], ...], list[int]] = defaultdict(list)
        wanted = [normalize_gen_kwargs(dict(request.args[1]), self.max_gen_toks) for request in requests]
        for index, options in enumerate(wanted):
            shaping = [(name, options[name]) for name in ("temperature", "top_k", "top_p") if options.get(name)]
            groups[tuple(shaping) if options["do_sample"] else ()].append(index)
        for sampled, members in groups.items():
            prompts = [
                {
                    "tokens": self._prompt(requests[index].args[0], wanted[index]["max_gen_toks"]),
                    "max_new_tokens": wanted[index]["max_gen_toks"],
                    "seed": self.seed + index,
                }
                for index in members
            ]
            results = generate_many(
                self.model,
                prompts,
                batch_size=self.batch_rows,
                tokenizer=self.tokens,
                progress=not disable_tqdm,
                **{**self.settings, **dict(sampled)},
            )
            for index, result in zip(members, results, strict=True):
                new = result.new_tokens[: wanted[index]["max_gen_toks"]]
                text = self.tokens.reply(new).answer if self.thinking else self.tokens.decode(new)
                texts[index] = _cut(text, wanted[index]["until"])
                self._note(
                    requests[index],
                    steps=result.steps.tolist(),
                    tokens=round(result.tokens_per_forward * int(result.steps.sum())),
                    seed=result.seed,
                    text=text,
                )
        self._write_details()
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        pairs = [Pair(self._cut_left(context, max(1, self.max_length - len(new))), new) for _, context, new in requests]
        scores = self._score(pairs, show=not disable_tqdm)
        for (texts, _, _), score in zip(requests, scores, strict=True):
            self._note(texts, **_describe(score))
        self._write_details()
        return [(score.value, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, each token scored once, in windows of `max_length`."""
        windows: list[Pair] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            tokens = self.tokens.encode(request.args[0], bos=False)
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                windows.append(Pair(*make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for index, score in zip(owners, self._score(windows, show=not disable_tqdm), strict=True):
            totals[index] += score.value
            self._note(requests[index], **_describe(score))
        self._write_details()
        return totals

    def _prompt(self, context: str, num_new: int) -> list[int]:
        """Cut a context from the left, to leave room for the whole canvases that `num_new` tokens need."""
        config = self.model.config
        room = config.max_position_embeddings - -(-num_new // config.canvas_length) * config.canvas_length
        rule = f"leave room for a prompt in {config.max_position_embeddings} positions"
        require(room >= 1, "max_gen_toks", rule, num_new, "Lower it with --gen_kwargs max_gen_toks=256.")
        return self._cut_left(self.tok_encode(context), room)

    def _cut_left(self, context: list[int], room: int) -> list[int]:
        """Return the last `room` tokens of a context, with a warning if it is longer."""
        if len(context) > room:
            logger.warning("A context of %d tokens is cut to its last %d.", len(context), room)
        return context[-room:]

    def _score(self, pairs: Sequence[Pair], *, show: bool) -> list[Score]:
        """Measure pairs in order of length, so that rows of a batch are of similar length."""
        empty = Score(bound=None, causal=None, is_greedy=self.check_greedy)
        scores = {index: empty for index, pair in enumerate(pairs) if not pair.continuation}
        order = [index for index in range(len(pairs)) if index not in scores]
        order.sort(key=lambda index: -len(pairs[index].context) - len(pairs[index].continuation))
        with progress_bar(desc="likelihood", unit="request", total=len(order), show=show) as bar:
            for start in range(0, len(order), _CHUNK):
                chosen = order[start : start + _CHUNK]
                chunk = [pairs[index] for index in chosen]
                bounds = self._bounds(chunk) if self.likelihood_mode != "causal" else [None] * len(chunk)
                causal = self._causal(chunk) if self.likelihood_mode != "bound" else [None] * len(chunk)
                greedy = self._is_greedy(chunk) if self.check_greedy else [False] * len(chunk)
                scores |= zip(chosen, map(Score, bounds, causal, greedy), strict=True)
                bar.update(len(chunk))
        return [scores[index] for index in range(len(pairs))]

    def _bounds(self, pairs: Sequence[Pair]) -> list[Estimate]:
        """Return minus the NELBO of each continuation, with its interval over the rows of the request.

        Rows of a request have independent noise. Row k has the same seed in every request. Each possible answer
        to a question is a separate request, and the same noise makes the answers easier to compare.
        """
        seeds = row_seeds(self.seed, 0, range(_COPIES)).repeat(len(pairs))
        found = evaluate(
            self.model,
            _rows([pair for pair in pairs for _ in range(_COPIES)], self.tokens.pad_token_id),
            learnt_noise(self.model),
            batch_size=self.batch_rows,
            num_samples=-(-self.num_samples // _COPIES),
            seed=seeds,
            progress=False,
        )
        return [mean_of(copies) for copies in (-found.rows.nats).view(-1, _COPIES).tolist()]

    @torch.no_grad()
    def _causal(self, pairs: Sequence[Pair]) -> list[float]:
        """Return the autoregressive log-likelihood of each continuation."""
        found, pad = list[float](), self.tokens.pad_token_id
        for start in range(0, len(pairs), self.batch_rows):
            batch = _rows(pairs[start : start + self.batch_rows], pad).to(self.model.device)
            canvases = cut_canvases(batch, canvas_len=self.model.config.canvas_length, fill_token=pad)
            cost = read_canvases(self.model, canvases).causal_cost()
            assert cost is not None
            found += (-torch.where(canvases.causal_scored, cost.double(), 0.0).sum(1)).tolist()
        return found

    def _is_greedy(self, pairs: Sequence[Pair]) -> list[bool]:
        """Return which continuations the model writes itself: with its sampler, or autoregressively by the argmax."""
        if self.likelihood_mode == "causal":
            with torch.no_grad():
                return [self._writes_causally(pair) for pair in pairs]
        prompts = [{"tokens": context, "max_new_tokens": len(new), "seed": self.seed} for context, new in pairs]
        results = generate_many(
            self.model, prompts, batch_size=self.batch_rows, tokenizer=self.tokens, progress=False, **self.settings
        )
        return [
            result.new_tokens[: len(pair.continuation)].tolist() == pair.continuation
            for pair, result in zip(pairs, results, strict=True)
        ]

    def _writes_causally(self, pair: Pair) -> bool:
        row = torch.tensor([[*pair.context, *pair.continuation]], device=self.model.device)
        logits = self.model.causal_logits(row)
        return logits[0, len(pair.context) - 1 : -1].argmax(-1).tolist() == pair.continuation

    def _note(self, request: Any, **values: Any) -> None:
        """Keep what was measured for a request."""
        place = {"task": getattr(request, "task_name", None), "doc_id": getattr(request, "doc_id", None)}
        source = {"context": request[0], "continuation": request[1]} if isinstance(request, tuple) else place
        self._details.append({**source, **values})

    def _write_details(self) -> None:
        if self._details_path is not None:
            lines = (json.dumps(entry, ensure_ascii=False) + "\n" for entry in self._details)
            write_text(self._details_path, "".join(lines))


def _rows(pairs: Sequence[Pair], pad: int) -> TrainBatch:
    """Return pairs as rows. What follows a continuation is unknown, so it is hidden and not scored."""
    rows, unknown = [[*pair.context, *pair.continuation] for pair in pairs], torch.ones(len(pairs), dtype=torch.bool)
    return TrainBatch.of_rows(rows, [len(pair.context) for pair in pairs], pad, truncated=unknown)


def _describe(score: Score) -> dict[str, Any]:
    value, error = score.bound or (None, None)
    return {"bound": value, "bound_error": error, "causal": score.causal, "is_greedy": score.is_greedy}


def _cut(text: str, until: Iterable[str]) -> str:
    """Return the text before the first stop string."""
    return text[: min((place for stop in until if stop and (place := text.find(stop)) >= 0), default=len(text))]


def _read_sampler(text: str) -> Sampler:
    try:
        return parse_sampler(text.replace(";", ","))  # the harness splits arguments at commas
    except ValueError as error:
        raise ValueError(f"sampler {error}.") from None
