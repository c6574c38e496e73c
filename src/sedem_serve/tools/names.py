"""What documents an agent means by a name, a path, an address or a scope."""

from __future__ import annotations

import os
import posixpath
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from urllib.parse import unquote

SCHEME = "sedem:///"
"""Precedes the name of a document in its address."""
_ADDRESS = re.compile(r"(?:sedem:///|file:(?://(?:localhost)?(?=/))?)(.*)", re.DOTALL | re.I)
_SPAN = re.compile(r"(.+):(\d+)-(\d+)", re.DOTALL)

Span = tuple[int, int]


EVERYTHING = ("", ".", "*", "all")
"""What a scope may be that limits nothing, if no document or folder has that name."""


class Names:
    """What documents can be called.

    Args:
        documents: of each document its bank, its name there, and the folders that the name may be
            relative to.
    """

    def __init__(self, documents: Iterable[tuple[str, str, Sequence[str]]]) -> None:
        self.names = [
            (f"{bank}/{name}", name, *(os.path.join(root, name) for root in roots))
            for bank, name, roots in documents
        ]

    def named(self, written: str) -> tuple[list[int], Span | None]:
        """Return the documents that may be meant, and the span that a passage's id has.

        An exact name comes first, then one that differs in case or in the form of its letters or of
        its path, and then the end of a path.
        """
        for form, span in _forms(written):
            for found in self._kinds(form):
                if found:
                    return found, span
        return [], None

    def within(self, scope: str) -> set[int]:
        """Return the documents that a scope has: one, those of a folder, or those of a pattern."""
        found = set(self.named(scope)[0])
        for form, _ in _forms(scope):
            for wanted in _keys(form):
                found |= {
                    index
                    for index, own in enumerate(self.keys)
                    if any(n.startswith(f"{wanted}/") or fnmatchcase(n, wanted) for n in own)
                }
        everything = not found and _key(scope) in EVERYTHING
        return set(range(len(self.names))) if everything else found

    @cached_property
    def keys(self) -> list[list[str]]:
        """The names as they are compared."""
        return [[_key(name) for name in own] for own in self.names]

    def _kinds(self, form: str) -> Iterator[list[int]]:
        yield [index for index, own in enumerate(self.names) if form in own]
        wanted, end = _keys(form), f"/{_key(form)}"
        yield [index for index, own in enumerate(self.keys) if not wanted.isdisjoint(own)]
        yield [index for index, own in enumerate(self.keys) if own[0].endswith(end)]


def _forms(written: str) -> Iterator[tuple[str, Span | None]]:
    """Yield what a name may be: as it is, without a place in the document, or a passage's."""
    text = written.strip()
    if address := _ADDRESS.fullmatch(text):
        text = unquote(address[1])
    yield text, None
    if "#" in text:
        yield text.rpartition("#")[0], None
    if found := _SPAN.fullmatch(text):
        yield found[1], (int(found[2][:18]), int(found[3][:18]))


def _keys(form: str) -> set[str]:
    return {_key(form), _key(os.path.abspath(os.path.expanduser(form)))}


def _key(name: str) -> str:
    """Return a name as it is compared: its path in its shortest form, without case."""
    path = posixpath.normpath(name.strip().replace("\\", "/")).strip("/")
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())
