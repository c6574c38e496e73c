"""The functions that docs/paper-map.md names are those that a default run calls."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType

from sedem import Decoding, Document, SeDeM
from sedem.engine.static import open_engine

MAP = Path(__file__).parents[1] / "docs" / "paper-map.md"
NAME = re.compile(r"`([\w.]+)`(?: \(fast: `([\w.]+)`\))?")


def rows() -> dict[str, list[str]]:
    """The functions that run, by row of sections 3 to 3.3 and appendix Inference."""
    found = {}
    for line in MAP.read_text(encoding="utf-8").splitlines():
        if line.startswith(("| 3", "| app. Inference")):
            _, place, names, *_ = line.split("|")
            found[place.strip()] = [fast or name for name, fast in NAME.findall(names)]
    return found


def called(model: SeDeM, documents: list[Document]) -> set[str]:
    """Functions that run while documents are read and a question is answered."""
    names = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("sedem."):
            names.add(f"{module.removeprefix('sedem.')}.{frame.f_code.co_qualname}")

    sys.setprofile(note)
    threading.setprofile(note)  # documents are cut in a thread
    try:
        bank = model.read(documents)
        model.answer(bank, "What is the rent?", decoding=Decoding(3))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return names


def test_a_default_question_runs_what_the_paper_map_names(
    model: SeDeM, documents: list[Document]
) -> None:
    model.engine = open_engine("auto", model)
    names, expected = called(model, documents), rows()
    assert len(expected) > 8
    silent = {
        name: place
        for place, wanted in expected.items()
        for name in wanted
        if not any(one == name or one.startswith(f"{name}.") for one in names)
    }
    assert not silent


def test_the_reference_engine_runs_the_equations_themselves(
    model: SeDeM, documents: list[Document]
) -> None:
    names = called(model, documents)
    wanted = {"method.encoder.encode", "method.injection.prefill", "method.injection.step"}
    assert wanted <= names
