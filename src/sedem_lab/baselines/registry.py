"""Every method by name: those of sedem, and those that other packages add.

A package adds a method by an entry point of the group `sedem.methods`, which names a subclass of
`TrainedReader` or `FullContext`, or a function from `MethodSettings` to a `DocumentReader`. The
first line of its docstring describes it to users. Modules are imported when a method is used,
because torch takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from sedem.errors import ConfigError, first_line

if TYPE_CHECKING:
    from sedem_lab.baselines.trained import TrainedReader

GROUP = "sedem.methods"


@dataclass(frozen=True)
class ListedMethod:
    """A method that can be evaluated.

    Attributes:
        place: "module:name" of its class or of the function that opens it.
        what: a description for users.
        trained: whether it is a subclass of `TrainedReader`, with checkpoints of its own.
        frozen: whether it is a subclass of `FullContext`, on the frozen backbone of a checkpoint.
    """

    place: str
    what: str
    trained: bool = False
    frozen: bool = False

    def load(self) -> Any:
        """Return the class, or the function that opens the method."""
        module, _, name = self.place.partition(":")
        return getattr(import_module(module), name)


def _trained(place: str, what: str) -> ListedMethod:
    return ListedMethod(f"sedem_lab.baselines.{place}", f"trained: {what}", trained=True)


def _frozen(place: str, what: str) -> ListedMethod:
    return ListedMethod(f"sedem_lab.baselines.{place}", what, frozen=True)


METHODS = {
    "sedem": ListedMethod(
        "sedem_lab.evaluation.readers:open_sedem",
        "selects K blocks of hidden-state memory, decompresses and injects them",
    ),
    "full-context": _frozen(
        "full_context:FullContext", "the frozen backbone reads every document as text"
    ),
    "bm25": _frozen("bm25:BM25", "the frozen backbone reads the K paragraphs that BM25 finds"),
    "longllmlingua": _frozen(
        "longllmlingua:LongLLMLingua", "prunes the text to a quarter for each question"
    ),
    "full-context-tuned": _trained(
        "full_context_tuned:FullContextTuned",
        "the backbone with LoRA reads every document as text",
    ),
    "rag": _trained(
        "rag:RAG", "a selector like SeDeM's finds K paragraphs, a tuned reader reads them"
    ),
    "icae": _trained("icae:ICAE", "compresses segments into memory tokens for the frozen backbone"),
    "hmt": _trained("hmt:HMT", "reads segment after segment and recalls earlier memory"),
    "500x": _trained(
        "compressor_500x:Compressor500x",
        "compresses 500 tokens into keys and values of four for the frozen backbone",
    ),
    "beacon": _trained(
        "beacon:ActivationBeacon", "compresses windows into keys and values of beacon tokens"
    ),
    "comprexit": _trained(
        "comprexit:ComprExIT", "fuses the states of all layers and moves them to soft tokens"
    ),
}
"""The methods of sedem."""
TRAINED = tuple(name for name, method in METHODS.items() if method.trained)
"""The trained baselines of sedem."""


def methods() -> dict[str, ListedMethod]:
    """All methods by name, those of sedem first.

    Raises:
        ConfigError: a package adds a method that cannot be imported.
    """
    added = [point for point in entry_points(group=GROUP) if point.name not in METHODS]
    return METHODS | {point.name: _added(point) for point in added}


def find(name: str) -> ListedMethod:
    """Return a method; names of sedem take precedence.

    Raises:
        ConfigError: there is no method of that name, or it cannot be imported.
    """
    added = entry_points(group=GROUP)
    if name in METHODS:
        return METHODS[name]
    if name in added.names:
        return _added(added[name])
    known = ", ".join([*METHODS, *sorted(added.names - METHODS.keys())])
    raise ConfigError(f"there is no method '{name}'; there are {known}")


def reader_class(name: str) -> type[TrainedReader]:
    """Return the class of a trained baseline.

    Raises:
        ConfigError: no trained baseline has that name.
    """
    if not find(name).trained:
        raise ConfigError(f"'{name}' is not trained; methods that are: {', '.join(TRAINED)}")
    kind: type[TrainedReader] = find(name).load()
    return kind


def _added(point: EntryPoint) -> ListedMethod:
    """The method that an entry point of another package adds."""
    from sedem_lab.baselines.full_context import FullContext
    from sedem_lab.baselines.trained import TrainedReader

    try:
        opener = point.load()
    except Exception as error:  # whatever the code of others raises
        raise ConfigError(
            f"method '{point.name}' cannot be imported from '{point.value}' "
            f"({first_line(error)}); update or uninstall its package"
        ) from None
    what = (opener.__doc__ or point.value).strip().partition("\n")[0]
    kinds = opener.__mro__ if isinstance(opener, type) else ()
    return ListedMethod(point.value, what, TrainedReader in kinds, FullContext in kinds)
