"""Log-probabilities in OpenAI's two forms: of each token when it was written, and of its best alternatives."""

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

from dgemma.checkpoint.tokenizer import Tokenizer
from dgemma.constraints.token_text import token_texts
from dgemma.many.batch import Scores

_LEAST = -9999.0  # OpenAI's number for a token of probability 0; JSON has no infinity


class LogProbs:
    """The log-probabilities of one answer. Each call returns those of tokens that no earlier call has returned."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._bytes = tokenizer, token_texts(tokenizer)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_tokens = self._num_chars = 0  # returned already

    def chat(self, scores: Sequence[Scores], num_tokens: int) -> dict[str, Any] | None:
        """Return the new tokens in the form of a chat; None if there are none."""
        content = [
            {**self._describe(*written), "top_logprobs": [self._describe(*other) for other in others]}
            for written, others in self._new(scores, num_tokens)
        ]
        return {"content": content, "refusal": None} if content else None

    def completion(self, scores: Sequence[Scores], num_tokens: int) -> dict[str, Any] | None:
        """Return the new tokens in the form of a completion; None if there are none. Offsets are in the answer."""
        tokens, log_probs, offsets, top = [], [], [], []
        for written, others in self._new(scores, num_tokens):
            tokens.append(self._name(written[0]))
            log_probs.append(written[1])
            offsets.append(self._num_chars)
            top.append({self._name(token): log_prob for token, log_prob in (*others, written)} if others else None)
            self._num_chars += len(self._decoder.decode(self._visible(written[0])))
        if not tokens:
            return None
        top_log_probs = None if None in top else top
        return {"tokens": tokens, "token_logprobs": log_probs, "top_logprobs": top_log_probs, "text_offset": offsets}

    def _new(
        self, scores: Sequence[Scores], num_tokens: int
    ) -> Iterator[tuple[tuple[int, float], list[tuple[int, float]]]]:
        """Yield each new token and its alternatives, with their log-probabilities."""
        start, self._num_tokens = self._num_tokens, num_tokens
        ids = [row for block in scores for row in block.tokens.tolist()][start:num_tokens]
        log_probs = [row for block in scores for row in block.log_probs.tolist()][start:num_tokens]
        for tokens, values in zip(ids, log_probs, strict=True):
            written, *others = zip(tokens, values, strict=True)
            yield (written[0], max(written[1], _LEAST)), [other for other in others if other[1] > _LEAST]

    def _describe(self, token: int, log_prob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": self._name(token), "logprob": log_prob, "bytes": None if text is None else list(text)}

    def _name(self, token: int) -> str:
        """Return a token's text. Parts of characters are escaped, and control tokens have their names."""
        text = self._text(token)
        if text is None:
            return self._tokenizer.decode([token], skip_special=False)
        try:
            return text.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in text)

    def _visible(self, token: int) -> bytes:
        """Return the bytes that a token adds to the answer."""
        text = self._text(token)
        return self._tokenizer.decode([token]).encode() if text is None else text

    def _text(self, token: int) -> bytes | None:
        return self._bytes[token] if token < len(self._bytes) else None
