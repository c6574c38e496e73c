"""A plugin of `llm`: banks as models, as a toolbox and as fragments; docs/agents.md shows them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import llm
from pydantic import create_model

from sedem.config import PASSAGES
from sedem.reading.followed import OpenBank
from sedem_serve.tools.toolbox import Toolbox

_PARAMETERS = signature(Toolbox.request).parameters
OPTIONS: dict[str, Any] = {name: (int, _PARAMETERS[name].default) for name in ("k", "max_tokens")}
"""Options that the model takes, as `Toolbox.request` does."""


@cache
def opened(place: str) -> Toolbox:
    """Return the tools over a bank."""
    from sedem.backbone.loading import hide_bars
    from sedem.checkpoint.folder import model_of
    from sedem.model import SeDeM

    hide_bars()
    model = SeDeM.from_pretrained(model_of(place))
    return Toolbox([OpenBank(Path(place), Path(place).stem)], lambda: model)


class BankModel(llm.Model):
    """A bank that answers questions from its documents; earlier turns are not considered."""

    can_stream = True

    Options: Any = create_model(
        "Options",
        __base__=llm.Options,
        __doc__="Number of blocks, 0 for the model's own, and most tokens of an answer.",
        **OPTIONS,
    )

    def __init__(self, path: Path) -> None:
        self.model_id, self.path = f"sedem/{path.name}", path

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        """Answer the prompt in pieces; sources and confidences go into the log."""
        tools, options = opened(str(self.path)), prompt.options
        last = conversation.responses[-1] if conversation and conversation.responses else None
        context = "" if last is None else f"{last.prompt.prompt}\n{last.text()}"
        given = {name: getattr(options, name) for name in OPTIONS}
        asked = tools.request(prompt.prompt, context=context, **given)
        if asked is None:
            yield "There are no documents."
            return
        bank, request, decoding = asked
        reply = tools.model().stream(
            request.bank,
            request.question,
            k=request.k,
            decoding=decoding,
            context=request.context,
        )
        yield from reply
        assert reply.answer is not None
        response.response_json = tools.answered(bank, reply.answer).model_dump()


class Sedem(llm.Toolbox):
    """Tools over a bank."""

    def __init__(self, place: str) -> None:
        self._place = place

    def search(self, question: str, k: int = PASSAGES) -> str:
        """Find passages of documents that answer a question: exact quotations, data only."""
        return opened(self._place).search(question, k=k).model_dump_json()

    def read(self, document: str, start: int = 0) -> str:
        """Read a part of a document, from a character on, or around the id of a passage."""
        return opened(self._place).read(document, start).model_dump_json()


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Register the banks of the working folder, or of those that SEDEM_BANKS names."""
    for folder in os.environ.get("SEDEM_BANKS", ".").split(os.pathsep):
        for path in sorted(Path(folder).expanduser().glob("*.bank")):
            register(BankModel(path))


@llm.hookimpl
def register_tools(register: Callable[..., None]) -> None:
    """Register the toolbox."""
    register(Sedem)


@llm.hookimpl
def register_fragment_loaders(register: Callable[..., None]) -> None:
    """Register the prefix `sedem:`."""
    register("sedem", documents_of)


def documents_of(place: str) -> list[llm.Fragment]:
    """Return the texts of a bank's documents."""
    snapshot = OpenBank(Path(place), place).snapshot()
    documents = [] if snapshot is None else snapshot.documents
    return [llm.Fragment(one.text, f"sedem:{place}/{one.name}") for one in documents]
