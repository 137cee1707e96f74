"""A race in the terminal: diffusion and autoregressive writing with the same weights, next to each other."""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TextIO

from torch import Tensor

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.printing import printable
from dgemma.run.records import BlockCommit, Events, StepRecord
from dgemma.view.pieces import width
from dgemma.view.screen import BOLD, FAINT, Ink, Wrap
from dgemma.view.terminal import LiveView

_GAP = " │ "


class RaceView(LiveView):
    """Two live texts: diffusion on the left, autoregressive writing on the right.

    Both share one device and get the same time: the one that has used less time takes the next forward.

    Example:
        with RaceView(tokenizer) as view:
            view.race(dgemma.stream(model, prompt), stream_causal(model, prompt))
        print(view.result)
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        prefix: str = "",
        file: TextIO | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ) -> None:
        super().__init__(tokenizer, prefix=prefix, file=file, eos_token_ids=eos_token_ids)
        self.causal_tokens: list[int] = []
        self.times = {"diffusion": 0.0, "autoregressive": 0.0}  # seconds of forwards

    def race(self, diffusion: Events, causal: Iterable[Tensor]) -> None:
        """Run both to their ends."""
        runners: dict[str, Iterator[StepRecord | BlockCommit | Tensor]] = {
            "diffusion": diffusion,
            "autoregressive": iter(causal),
        }
        while runners:
            name = min(runners, key=lambda name: self.times[name])
            start = time.perf_counter()
            event = next(runners[name], None)
            self.times[name] += time.perf_counter() - start
            if event is None:
                del runners[name]
            elif isinstance(event, Tensor):
                self.causal_tokens += event[self.row].tolist()
                if self.screen.is_due:
                    self.screen.draw(self.draw())
            else:
                self(event)

    @property
    def causal_text(self) -> str:
        """The autoregressive text so far."""
        return self._decode(self._cut(self.causal_tokens))

    @property
    def result(self) -> str:
        """One line per runner with tokens, forwards and seconds, and one that compares their forwards."""
        lines = [
            f"{name:14}  {tokens:4} tokens  {self.forwards[name]:4} forwards  {self.times[name]:5.1f} s  "
            f"{tokens / self.times[name]:6.1f} tokens/s"
            for name, tokens in self.num_tokens.items()
        ]
        seconds = {name: self.times[name] / forwards for name, forwards in self.forwards.items()}
        return "\n".join(
            (
                *lines,
                f"A forward of diffusion wrote {self.num_tokens['diffusion'] / self.num_forwards:.1f} tokens and took "
                f"{seconds['diffusion'] / seconds['autoregressive']:.1f} times as long as an autoregressive one.",
            )
        )

    @property
    def num_tokens(self) -> dict[str, int]:
        """The number of tokens that each runner has written."""
        return {"diffusion": len(self._finished), "autoregressive": len(self.causal_tokens)}

    @property
    def forwards(self) -> dict[str, int]:
        """The number of forwards of each runner."""
        return {"diffusion": self.num_forwards, "autoregressive": len(self.causal_tokens)}

    def draw(self) -> list[list[Ink]]:
        half = (self.screen.columns - len(_GAP)) // 2
        written = [Ink(printable(self.prefix), BOLD), Ink(printable(self.causal_text))]
        blank: list[Ink] = []
        left = [[Ink("diffusion", FAINT)], *self._lines(half)]
        right = [[Ink("autoregressive", FAINT)], *Wrap()(written, half)]
        return [
            [*one, Ink(" " * (half - sum(width(ink.text) for ink in one))), Ink(_GAP, FAINT), *other]
            for one, other in zip_longest(left, right, fillvalue=blank)
        ]
