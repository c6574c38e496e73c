"""The address of somebody's own model, which writes answers from quotations.

It speaks OpenAI's protocol, as Ollama, LM Studio, llama.cpp, vLLM and hosted services do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sedem.errors import ConfigError, ReaderError, first_line

if TYPE_CHECKING:
    from openai import OpenAI

CHARACTERS = 3.5
"""Characters of a token, counted so that a prompt rather has fewer tokens."""
REPLY = 1_024
"""Tokens that a prompt leaves for instructions and reply."""
KEYS = {"api.openai.com": "OPENAI_API_KEY"}
"""The variable of the environment with the key of a host; others have `KEY`."""
KEY = "SEDEM_READER_KEY"
SAID, THOUGHT, ENDED = "said", "thought", "ended"
"""Kinds of pieces of a reply: words of the answer, reasoning, and why it ended."""
OPEN, CLOSE = "<think>", "</think>"
"""Around what a model writes for itself, where its server does not keep that apart."""


@dataclass(frozen=True)
class Reader:
    """A model that writes answers from quotations, behind an address of OpenAI's protocol.

    Args:
        url: the base address, such as "http://127.0.0.1:11434/v1".
        model: its name there; None takes the only one.
        key: sent as the bearer token; None means `OPENAI_API_KEY` for OpenAI's own host and
            `SEDEM_READER_KEY` for others.
        context: tokens that it reads at once; servers of small models often have no more.
        timeout: seconds until a reply begins, and between two pieces of it.

    Raises:
        ConfigError: the address is none.
    """

    url: str
    model: str | None = None
    key: str | None = field(default=None, repr=False)
    context: int = 4_096
    timeout: float = 300.0

    def __post_init__(self) -> None:
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ConfigError(
                f"the reader's address is '{self.url}'; give one such as http://127.0.0.1:11434/v1"
            )
        if self.context < 2 * REPLY:
            raise ConfigError(f"context is {self.context}; it must be at least {2 * REPLY}")

    @property
    def host(self) -> str:
        """The host of the address."""
        return urlsplit(self.url).hostname or ""

    @property
    def is_local(self) -> bool:
        """Whether passages stay on this machine."""
        return is_loopback(self.host)

    @property
    def room(self) -> int:
        """Characters of quotations in one prompt."""
        return int((self.context - REPLY) * CHARACTERS)

    @cached_property
    def name(self) -> str:
        """Its name at its server.

        Raises:
            ReaderError: none is given, and the server does not have exactly one.
        """
        if self.model is not None:
            return self.model
        with self._told():
            names = [one.id for one in self._client.models.list()]
        if len(names) == 1:
            return names[0]
        has = f"has {', '.join(sorted(names)[:20])}" if names else "has no model"
        raise ReaderError(f"no model is named, and {self.url} {has}; name one")

    def reply(
        self, messages: Sequence[Mapping[str, str]], fields: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """Yield a reply in pieces as they come, each with its kind.

        Args:
            messages: roles and contents.
            fields: other fields of the request, such as its sampling or a schema.

        Raises:
            ReaderError: the server cannot be reached, or refuses.
        """
        create: Any = self._client.chat.completions.create  # typed for fields of its own
        with (
            self._told(),
            create(model=self.name, messages=messages, stream=True, **fields) as stream,
        ):
            yield from apart(
                piece
                for chunk in stream
                for choice in chunk.choices[:1]
                for piece in pieces_of(choice)
            )

    @cached_property
    def _client(self) -> OpenAI:
        from openai import DefaultHttpxClient, OpenAI

        # The library wants a key, which servers of this machine do not look at. No proxy of the
        # environment reaches them.
        return OpenAI(
            base_url=self.url,
            api_key=self.key or os.environ.get(KEYS.get(self.host, KEY)) or "none",
            timeout=self.timeout,
            max_retries=1,
            http_client=DefaultHttpxClient(trust_env=not self.is_local),
        )

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say in one sentence why a server gives no reply."""
        import openai

        called = f"model '{self.model}'" if self.model else "the reader"
        try:
            yield
        except openai.APITimeoutError:
            problem = f"{called} at {self.url} did not answer within {self.timeout:,.0f} s"
        except openai.APIConnectionError:
            problem = f"{self.url} cannot be reached; start its server, or give its address"
        except openai.AuthenticationError:
            variable = KEYS.get(self.host, KEY)
            problem = f"{self.url} refuses the key; set {variable} to a valid one"
        except openai.APIStatusError as error:
            problem = f"{called} at {self.url} refuses with {error.status_code}: {error.message}"
        except openai.OpenAIError as error:
            problem = f"{called} at {self.url} failed: {first_line(error)}"
        else:
            return
        raise ReaderError(problem) from None


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, reached by nobody else."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def pieces_of(choice: Any) -> Iterator[tuple[str, str]]:
    """Yield the pieces of a choice of a stream; servers have two names for reasoning."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(text := getattr(choice.delta, name, None), str) and text:
            yield THOUGHT, text
            break
    if choice.delta.content:
        yield SAID, choice.delta.content
    if choice.finish_reason:
        yield ENDED, choice.finish_reason


def apart(pieces: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Keep reasoning between tags apart from the reply."""
    kind, held = SAID, ""
    for given, piece in pieces:
        if given != SAID:
            yield given, piece
            continue
        held += piece
        while True:
            tag = OPEN if kind == SAID else CLOSE
            before, found, after = held.partition(tag)
            if not found:
                break
            if before:
                yield kind, before
            kind, held = THOUGHT if kind == SAID else SAID, after
        # What may be the beginning of a tag waits for the next piece.
        keep = next((n for n in range(len(tag) - 1, 0, -1) if held.endswith(tag[:n])), 0)
        if text := held[: len(held) - keep]:
            yield kind, text
        held = held[len(held) - keep :]
    if held:
        yield kind, held
