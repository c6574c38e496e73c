"""The methods that can be evaluated, and the names they are opened by.

A method's module is imported when the method is opened, because torch takes seconds to import.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from sedem.answering.decoding import Decoding
from sedem.baselines.registry import TRAINED, reader_class
from sedem.config import DEFAULT_MODEL
from sedem.errors import ConfigError
from sedem.evaluation.config import MethodSettings
from sedem.types import Answer, Reader

if TYPE_CHECKING:
    from sedem.backbone.decoder import Backbone
    from sedem.data.examples import Example


class Method(Protocol):
    """Answers batches of examples.

    Attributes:
        batch: number of examples answered together.
        backbone: the backbone that answers, or None if unknown. Sizes of memory are compared with
            its keys and values.
        reader: the same method for one question at a time, which the bench measures.
    """

    batch: int
    backbone: Backbone | None
    reader: Reader

    def answer(self, examples: Sequence[Example]) -> list[Answer]:
        """Answer each example from its own documents."""
        ...


METHODS: dict[str, tuple[str, str]] = {
    "sedem": (
        "open_sedem",
        "selects K blocks of hidden-state memory, decompresses and injects them",
    ),
    "full-context": ("open_full_context", "the frozen backbone reads every document as text"),
    "bm25": ("open_bm25", "the frozen backbone reads the K paragraphs that BM25 finds"),
    "longllmlingua": ("open_longllmlingua", "prunes the text to a quarter for each question"),
    **{name: ("", f"trained: {what}") for name, (_, what) in TRAINED.items()},
}
"""The name of each method, the function in `readers.py` that opens it, and its description.

Trained baselines are opened by their class in `sedem.baselines.registry`.
"""


def has_selection_budget(method: str) -> bool:
    """Whether a method has a selection budget (k)."""
    if method in TRAINED:
        return reader_class(method).has_selection_budget
    return method in ("sedem", "bm25")


def default_checkpoint(method: str) -> str:
    """The checkpoint that a method is opened with if none is named.

    Raises:
        ConfigError: the method must be trained first.
    """
    if method in TRAINED:
        raise ConfigError(
            f"{method} has no shipped checkpoint; train one with 'sedem train {method}' and name "
            "it with -m"
        )
    return DEFAULT_MODEL


def open_method(name: str, settings: MethodSettings) -> Method:
    """Open a method by name.

    Raises:
        ConfigError: there is no method of that name, or a setting does not fit it.
    """
    if name not in METHODS:
        raise ConfigError(f"there is no method '{name}'; there are {', '.join(METHODS)}")
    module, opener, given = "readers", METHODS[name][0], list[str]()
    if name in TRAINED:
        module, opener, given = "trained", "open_trained", [name]
    found = importlib.import_module(f"sedem.evaluation.{module}")
    method: Method = getattr(found, opener)(*given, settings)
    return method


def refuse(method: str, settings: MethodSettings, *names: str) -> None:
    """Raise a `ConfigError` if settings that a method ignores do not have their defaults.

    Otherwise a result would record a setting that had no effect.
    """
    for name in names:
        value = getattr(settings, name)
        if value != MethodSettings.model_fields[name].default:
            raise ConfigError(f"{name} is {value!r}, but {method} has no {name}; leave it out")


def decoding_of(settings: MethodSettings) -> Decoding:
    """Greedy decoding up to the answer limit."""
    if settings.max_new_tokens is None:
        return Decoding()
    return Decoding(max_new_tokens=settings.max_new_tokens)
