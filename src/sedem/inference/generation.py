"""One generate path for every method: greedy or sampled, stop strings, streaming, batches.

A method gives the logits of its prefix and a function that runs one more token; this file does the
rest. Letters: B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sedem.engine.interface import Step
from sedem.errors import ConfigError
from sedem.inference.prompts import ANSWER_LIMIT

UNFINISHED = "\ufffd"
"""What tokenizers give for the bytes of a character that is not complete."""


@dataclass(frozen=True)
class Decoding:
    """How answers are generated.

    Attributes:
        max_new_tokens: limit of the answer, end token included.
        temperature: 0 is greedy; above, tokens are sampled.
        top_k: sample among this many tokens; 0 is no limit.
        top_p: sample among the likeliest tokens of this total probability.
        stop: strings that end the answer and are not part of it.
        seed: seed of sampling.
    """

    max_new_tokens: int = ANSWER_LIMIT
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # type: ignore[unreachable]  # a caller may be untyped
            raise ConfigError(f"stop is the string {self.stop!r}; give a list of strings")
        _check_whole("max_new_tokens", self.max_new_tokens, 1, 2**31)
        _check_whole("top_k", self.top_k, 0, 2**31)
        _check_whole("seed", self.seed, 0, 2**63)
        if self.temperature != 0 and not 1e-3 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or at least 0.001"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if any(not text for text in self.stop):
            raise ConfigError("a stop string is empty; leave it out")

    def chooser(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """A function from logits `[B, V]` to tokens `[B]`."""
        if self.temperature == 0:
            return lambda logits_BV: logits_BV.argmax(-1)
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


def _check_whole(name: str, value: object, least: int, limit: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < limit:
        raise ConfigError(
            f"{name} is {value!r}; it must be a whole number of at least {least} and below {limit}"
        )


class Transcript:
    """The text of one answer as it grows.

    Text is held back while it could still change: an unfinished character, or the beginning of a
    stop string. What has been given out is never taken back.

    Args:
        tokenizer: turns tokens into text.
        eos_token_id: the end token.
        decoding: limit and stop strings.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, eos_token_id: int, decoding: Decoding
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.decoding = decoding
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._taken = 0

    def add(self, token: int) -> None:
        """Take one more token."""
        if token == self.eos_token_id:
            self.finish_reason = "end"
        else:
            self.ids.append(token)
            self._decode()
            self._cut_at_stop()
            if self.finish_reason is None and len(self.ids) >= self.decoding.max_new_tokens:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            self.text = self.text.rstrip()

    def take(self) -> str:
        """The text that is certain by now and was not taken before."""
        certain = len(self.text) if self.finish_reason is not None else self._certain()
        piece = self.text[self._taken : certain]
        self._taken = max(self._taken, certain)
        return piece

    def cut(self) -> tuple[str, ...]:
        """One sentence if the answer was cut off at its limit."""
        if self.finish_reason != "length":
            return ()
        limit = self.decoding.max_new_tokens
        return (f"the answer was cut off at its limit of {limit} tokens",)

    def _decode(self) -> None:
        text = self.tokenizer.decode(
            self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        # Half a character is no text, and where single bytes are tokens it can spoil the
        # characters before it until it is whole.
        text = text.lstrip().rstrip(UNFINISHED)
        if len(text) > len(self.text):
            self.text = text

    def _cut_at_stop(self) -> None:
        found = [at for stop in self.decoding.stop if (at := self.text.find(stop)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.finish_reason = "stop"

    def _certain(self) -> int:
        held = 0
        for stop in self.decoding.stop:
            for size in range(1, min(len(stop), len(self.text)) + 1):
                if self.text.endswith(stop[:size]):
                    held = max(held, size)
        # White space before what is held back may turn out to end the answer.
        return len(self.text[: len(self.text) - held].rstrip())


def generate(
    logits_BV: Tensor,
    step: Step,
    tokenizer: PreTrainedTokenizerBase,
    eos_token_id: int,
    decoding: Decoding,
    *,
    ahead: bool = False,
) -> Iterator[list[Transcript]]:
    """Generate a batch of answers.

    Args:
        logits_BV: logits after the prefix.
        step: runs one more token of every row.
        tokenizer: turns tokens into text.
        eos_token_id: the end token.
        decoding: how.
        ahead: from the second token on, start each step before the token before it is read, so that
            a GPU does not wait for text to be made; at the end one step is in vain.

    Yields:
        The transcripts of all rows, after each token; the same list every time. The last time all
        are finished.
    """
    rows = [Transcript(tokenizer, eos_token_id, decoding) for _ in range(len(logits_BV))]
    choose = decoding.chooser(logits_BV.device)
    live = list(range(len(rows)))
    for count in range(1, decoding.max_new_tokens + 1):
        ids_B = choose(logits_BV)
        read = _fetch(ids_B)
        # The first token is given out as soon as it is there.
        in_advance = ahead and 1 < count < decoding.max_new_tokens
        if in_advance:
            logits_BV = step(ids_B, live)
        tokens = read()
        for row in live:
            rows[row].add(tokens[row])
        live = [row for row in live if rows[row].finish_reason is None]
        yield rows
        if not live:
            return
        if not in_advance:
            logits_BV = step(ids_B, live)


def _fetch(ids_B: Tensor) -> Callable[[], list[int]]:
    """Tokens on their way to the host; what is given to the device after this is not waited for."""
    if ids_B.device.type != "cuda":
        return ids_B.tolist
    on_host, arrived = ids_B.to("cpu", non_blocking=True), torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(ids_B.device))

    def read() -> list[int]:
        arrived.synchronize()
        return list(on_host.tolist())

    return read
