"""The methods that can be evaluated by name.

Nothing heavy is imported here; a method's module is imported when the method is opened.
"""

from __future__ import annotations

import importlib

from sedem.baselines.registry import TRAINED, reader_class
from sedem.config import DEFAULT_MODEL
from sedem.errors import ConfigError
from sedem.evaluation.method import Method, Setting

METHODS: dict[str, tuple[str, str]] = {
    "sedem": ("open_sedem", "hidden-state memories, K blocks selected and decompressed"),
    "full-context": ("open_full_context", "the frozen backbone reads every document as text"),
    "bm25": ("open_bm25", "BM25 picks K paragraphs, the frozen backbone reads them as text"),
    "longllmlingua": ("open_longllmlingua", "the text thinned to a quarter for each question"),
    **{name: ("", f"trained: {what}") for name, (_, what) in TRAINED.items()},
}
"""What a user can name: the function of `readers.py` that opens it, and what it is.

Trained baselines are opened by the class that `sedem.baselines.registry` names.
"""

UNTRAINED_WITH_BUDGET = ("sedem", "bm25")
"""The other methods that have a selection budget (k)."""


def has_selection_budget(method: str) -> bool:
    """Whether a method has a selection budget (k)."""
    if method in TRAINED:
        return reader_class(method).has_selection_budget
    return method in UNTRAINED_WITH_BUDGET


def default_checkpoint(method: str) -> str:
    """The checkpoint of a method when nobody names one: sedem brings one for each."""
    return f"{method}-nano" if method in TRAINED else DEFAULT_MODEL


def open_method(name: str, setting: Setting) -> Method:
    """Open a method by name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in METHODS:
        raise ConfigError(f"there is no method '{name}'; there are {', '.join(METHODS)}")
    if name in TRAINED:
        from sedem.evaluation.trained import open_trained

        return open_trained(name, setting)
    readers = importlib.import_module("sedem.evaluation.readers")
    method: Method = getattr(readers, METHODS[name][0])(setting)
    return method
