"""Banks of a tiny random model on disk, and the tools over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LEASE, RECIPE

from sedem import Document, SeDeM
from sedem.reading.followed import OpenBank
from sedem_serve.tools.toolbox import Toolbox


def place(name: str) -> tuple[str, slice]:
    """Return the document and the characters that the id of a passage names."""
    document, _, span = name.rpartition(":")
    start, end = span.split("-")
    return document, slice(int(start), int(end))


@pytest.fixture
def lease(model: SeDeM, tmp_path: Path) -> Path:
    """A bank of two documents, in a file."""
    place = tmp_path / "lease.bank"
    documents = [Document("lease.txt", LEASE), Document("kitchen/recipe.txt", RECIPE)]
    model.read(documents).save(place)
    return place


@pytest.fixture
def toolbox(model: SeDeM, lease: Path) -> Toolbox:
    """Tools over that bank, which may write notes."""
    return Toolbox([OpenBank(lease, "lease")], lambda: model, writable=True)


@pytest.fixture
def make_toolbox(model: SeDeM, tmp_path: Path) -> Callable[..., Toolbox]:
    """Return a function that makes tools over a bank of some documents, named `made`."""

    def make(*documents: Document, **options: Any) -> Toolbox:
        place = tmp_path / "made.bank"
        model.read(documents).save(place)
        return Toolbox([OpenBank(place, "made")], lambda: model, **options)

    return make
