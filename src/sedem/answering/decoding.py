"""Decoding, the same for every method, so that methods never differ in it.

Letters: B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sedem.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER_LIMIT = 64
"""Token limit of an answer (appendix Implementation Details)."""

LONG_ANSWER_LIMIT = 128
"""The same for QASPER and RULER."""

UNANSWERABLE = "The documents do not say."
"""The answer if the evidence seems to be missing from the documents."""

UNFINISHED = "\ufffd"
"""What tokenizers return for the bytes of an incomplete character."""


@dataclass(frozen=True)
class Decoding:
    """How answers are generated.

    Attributes:
        max_new_tokens: token limit of an answer, including the end token.
        temperature: 0 is greedy; above 0 tokens are sampled.
        top_k: sample from this many of the likeliest tokens; 0 means from all.
        top_p: sample from the likeliest tokens that have this total probability.
        stop: strings that end the answer and are not part of it.
        logprobs: how many of the likeliest tokens to record at each place, besides the chosen one,
            with their log-probabilities; None records nothing.

    Raises:
        ConfigError: a value is out of its range.
    """

    max_new_tokens: int = ANSWER_LIMIT
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # type: ignore[unreachable]  # a caller may be untyped
            raise ConfigError(f"stop is the string {self.stop!r}; give a list of strings")
        for name, least, limit in (
            ("max_new_tokens", 1, 2**31), ("top_k", 0, 2**31), ("seed", 0, 2**63)
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < limit:
                raise ConfigError(
                    f"{name} is {value!r}; it must be a whole number of at least {least} and below "
                    f"{limit}"
                )
        if self.temperature != 0 and not 1e-3 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or at least 0.001"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if any(not text for text in self.stop):
            raise ConfigError("a stop string is empty; leave it out")

    def chooser(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return a function that chooses tokens `[B]` from logits `[B, V]`."""
        if self.temperature == 0:
            return lambda logits_BV: logits_BV.argmax(-1)
        # Imported here: greedy answers of a light model do not need transformers.
        from transformers import (
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        warpers = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        generator = torch.Generator(device).manual_seed(self.seed)

        def sample(logits_BV: Tensor) -> Tensor:
            ids_B1 = logits_BV.argmax(-1, keepdim=True)
            probabilities_BV = warpers(ids_B1, logits_BV.float()).softmax(-1)
            return torch.multinomial(probabilities_BV, 1, generator=generator)[:, 0]

        return sample


def log_probabilities(
    logits_V: Tensor, token: int | Tensor, decoding: Decoding
) -> list[tuple[int, float]] | None:
    """Return the log-probabilities of a token and of the likeliest ones, if they are recorded."""
    if decoding.logprobs is None:
        return None
    log_V = logits_V.float().log_softmax(-1)
    best = log_V.topk(min(decoding.logprobs, len(log_V)))
    likeliest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(int(token), float(log_V[token])), *likeliest]


GREEDY = Decoding()
"""The default."""


class Transcript:
    """The text of one answer while it grows.

    `take` withholds text that could still change: an incomplete character, or the beginning of a
    stop string. It never revises text that it has returned.

    Args:
        also: stop strings besides those of `decoding`.

    Attributes:
        ids: the tokens so far, without the one that ends the answer.
        logprobs: `log_probabilities` of each of them, if they are recorded.
        finish_reason: as in `Answer`; None while unfinished.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        decoding: Decoding,
        also: Sequence[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self.decoding = decoding
        self.stop = *decoding.stop, *also
        self.ids: list[int] = []
        self.logprobs: list[list[tuple[int, float]]] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._taken = 0

    def finish(self, text: str, reason: str) -> None:
        """Set the whole text at once, without tokens."""
        self.text, self.finish_reason = text, reason

    def add(self, token: int, logprobs: list[tuple[int, float]] | None = None) -> None:
        """Add one token, and its log-probabilities if they are recorded."""
        if token in self.end_ids:
            self.finish_reason = "end"
        else:
            self.ids.append(token)
            if logprobs is not None:
                self.logprobs.append(logprobs)
            # An incomplete character is not text yet. With byte tokens, until it is complete, it
            # can also change how the characters before it are decoded.
            text = self.tokenizer.decode(
                self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            text = text.lstrip().rstrip(UNFINISHED)
            if len(text) > len(self.text):
                self.text = text
            starts = [at for stop in self.stop if (at := self.text.find(stop)) >= 0]
            if starts:
                self.text, self.finish_reason = self.text[: min(starts)], "stop"
            elif len(self.ids) >= self.decoding.max_new_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            self.text = self.text.rstrip()

    def take(self) -> str:
        """Return the text that can no longer change and was not returned before."""
        certain = len(self.text)
        if self.finish_reason is None:
            withheld = 0
            for stop in self.stop:
                for size in range(1, min(len(stop), len(self.text)) + 1):
                    if self.text.endswith(stop[:size]):
                        withheld = max(withheld, size)
            # White space before it is stripped if the answer ends there.
            certain = len(self.text[: len(self.text) - withheld].rstrip())
        piece = self.text[self._taken : certain]
        self._taken = max(self._taken, certain)
        return piece

    def cut(self) -> tuple[str, ...]:
        """Return a one-sentence note if the answer was cut off at its limit, else nothing."""
        if self.finish_reason != "length":
            return ()
        limit = self.decoding.max_new_tokens
        return (f"the answer was cut off at its limit of {limit} tokens",)


def fetch(ids_B: Tensor) -> Callable[[], list[int]]:
    """Start copying tokens to the host; return a function that waits only for this copy."""
    if ids_B.device.type != "cuda":
        return ids_B.tolist
    on_host, arrived = ids_B.to("cpu", non_blocking=True), torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(ids_B.device))

    def read() -> list[int]:
        arrived.synchronize()
        return list(on_host.tolist())

    return read
