"""The address of somebody's own model, which writes answers from quotations.

It speaks OpenAI's protocol, as Ollama, LM Studio, llama.cpp, vLLM and hosted services do.
"""

from __future__ import annotations

import json
import os
import secrets
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
SAID, THOUGHT, CALLED, ENDED = "said", "thought", "called", "ended"
"""Kinds of pieces of a reply: words of the answer, reasoning, calls of tools, and why it ended."""
Piece = tuple[str, Any]
"""A kind and its text; of a call of a tool, the fields of the protocol's delta."""
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
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]
    ) -> Iterator[Piece]:
        """Yield a reply in pieces as they come, each with its kind.

        Args:
            messages: as the protocol has them.
            fields: other fields of the request, such as its sampling, a schema or tools.

        Raises:
            ReaderError: the server cannot be reached, refuses, or ends before it says anything.
        """
        create: Any = self._client.chat.completions.create  # typed for fields of its own
        kinds = set[str]()
        with (
            self._told(),
            create(model=self.name, messages=messages, stream=True, **fields) as stream,
        ):
            pieces = (
                piece
                for chunk in stream
                for choice in (getattr(chunk, "choices", None) or ())[:1]
                for piece in pieces_of(choice)
            )
            for kind, piece in numbered(apart(pieces)):
                kinds.add(kind)
                yield kind, piece
        # Some servers that fail within a reply only end it.
        if not kinds - {THOUGHT}:
            raise ReaderError(f"{self._called} at {self.url} broke off before it said anything")

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

    @property
    def _called(self) -> str:
        return f"model '{self.model}'" if self.model else "the reader"

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say in one sentence why a server gives no reply."""
        import openai

        called = self._called
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
        except (ValueError, AttributeError):  # of the library, about a page or broken JSON
            problem = f"{called} at {self.url} sends no OpenAI protocol; its address may lack /v1"
        else:
            return
        raise ReaderError(problem) from None


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, reached by nobody else."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def pieces_of(choice: Any) -> Iterator[Piece]:
    """Yield the pieces of a choice of a stream; servers have two names for reasoning."""
    delta = getattr(choice, "delta", None)
    for name in ("reasoning_content", "reasoning"):
        if isinstance(text := getattr(delta, name, None), str) and text:
            yield THOUGHT, text
            break
    if isinstance(text := getattr(delta, "content", None), str) and text:
        yield SAID, text
    for call in getattr(delta, "tool_calls", None) or ():
        yield CALLED, call.model_dump(exclude_none=True, warnings=False)
    if choice.finish_reason:
        yield ENDED, choice.finish_reason


def numbered(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Give each call of a tool a number and an id; some servers number all calls 0, or have no ids.

    The first piece of a call has its name, and the others only more of its arguments.
    """
    ids, places = list[str](), dict[int | None, int]()
    for kind, piece in pieces:
        if kind != CALLED:
            yield kind, piece
            continue
        index, id, function = piece.get("index"), piece.get("id"), piece.get("function", {})
        arguments, place = function.get("arguments", ""), places.get(index)
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        # Ids may change within a call, but then its name is not repeated.
        if place is None or (id and id != ids[place] and function.get("name")):
            place = places[index] = len(ids)
            ids.append(id or f"call_{secrets.token_hex(12)}")
            function = {**function, "arguments": arguments}
            known = {"index": place, "id": ids[place], "type": "function", "function": function}
            yield CALLED, {**piece, **known}
        elif arguments:
            yield CALLED, {"index": place, "function": {"arguments": arguments}}


def whole_calls(pieces: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return calls of tools, given their numbered pieces."""
    calls = list[dict[str, Any]]()
    for piece in pieces:
        if "id" in piece:
            calls.append({**piece, "function": {**piece["function"]}})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return [{name: value for name, value in one.items() if name != "index"} for one in calls]


def apart(pieces: Iterable[Piece]) -> Iterator[Piece]:
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
