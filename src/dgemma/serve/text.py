"""The text of a request while it is written: deltas for a stream, stop strings, and its finish reason."""

from bisect import bisect_left
from collections.abc import Sequence

from dgemma.checkpoint.tokenizer import THOUGHT_START, Reply, Tokenizer
from dgemma.run.plan import Plan
from dgemma.serve.engine import Written

_BROKEN = "\ufffd"  # the beginning of a character whose other bytes are in the next block


class GrowingText:
    """Text that grows by blocks. `delta` is the part that a stream has not sent yet.

    The end of the text is held back while it may be the beginning of a stop string or a character that is not complete.
    With `as_reply`, thoughts and tool calls are kept out of the text, also a thought whose beginning is not complete.
    """

    def __init__(
        self, tokenizer: Tokenizer, plan: Plan, stops: Sequence[str], max_tokens: int, *, as_reply: bool
    ) -> None:
        self.plan, self._tokenizer, self._stops = plan, tokenizer, stops
        self._max_tokens, self._as_reply = max_tokens, as_reply
        self.text = ""
        self.num_tokens = 0
        self.steps: list[int] = []
        self.finish_reason: str | None = None
        self.reply: Reply | None = None
        self._num_sent = 0

    def add(self, written: Written) -> None:
        """Take all tokens written so far. `finish_reason` is set if the text ends with them."""
        eos = frozenset(self.plan.eos_token_ids)
        end = next((at for at, token in enumerate(written.tokens, start=1) if token in eos), None)
        tokens = written.tokens[: min(self._max_tokens, end or len(written.tokens))]
        text, self.reply = self._read(tokens)
        stops_at = self._find_stop(tokens)
        if stops_at is not None:
            text = text[:stops_at]
            # The first tokens whose text has the stop string are the answer's.
            ends = range(len(tokens))
            tokens = tokens[: bisect_left(ends, True, key=lambda end: self._find_stop(tokens[:end]) is not None)]
        self.text, self.steps, self.num_tokens = text, written.steps, len(tokens)
        # A constraint also holds for a text without its stop token, for which there may be no room.
        num_written = len(written.tokens) if end is None else end - 1
        is_whole = self.plan.language is not None and written.ended and num_written <= self._max_tokens
        if stops_at is not None or (end is not None and end <= self._max_tokens) or is_whole:
            self.finish_reason = "stop"
        elif written.ended or len(tokens) == self._max_tokens:
            self.finish_reason = "length"

    def delta(self) -> str:
        """Return the new part of the text that is certain to stay."""
        end = len(self.text)
        if self.finish_reason is None:
            markers = [*self._stops, *([THOUGHT_START] if self._as_reply else [])]
            end = min(map(self._safe_end, markers), default=end)
            sure = self.text[:end].rstrip(_BROKEN)
            end = len(sure.rstrip() if self._as_reply else sure)  # a reply has no white space before a thought
        new = self.text[self._num_sent : end]
        self._num_sent = max(self._num_sent, end)
        return new

    def _read(self, tokens: list[int]) -> tuple[str, Reply | None]:
        """Return the text of tokens, and the reply that it is part of."""
        text = self._tokenizer.decode([token for token in tokens if token != self.plan.pad_token_id])
        reply = self._tokenizer.reply(text) if self._as_reply else None
        return text if reply is None else reply.answer, reply

    def _find_stop(self, tokens: list[int]) -> int | None:
        """Return where the first stop string begins in the text of tokens, None if it has none."""
        text, _ = self._read(tokens)
        return min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=None)

    def _safe_end(self, stop: str) -> int:
        """Return the length of the text without the longest beginning of a string at its end."""
        for length in range(min(len(stop) - 1, len(self.text)), 0, -1):
            if self.text.endswith(stop[:length]):
                return len(self.text) - length
        return len(self.text)
