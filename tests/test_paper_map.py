"""The functions that docs/paper-map.md names are those that a default run calls."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

from tools.house import Walk, walk

from sedem import Decoding, Document, SeDeM
from sedem.config import SMALL_MODEL
from sedem.demo import DOCUMENTS
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
    seen = Walk()
    sys.setprofile(seen)
    threading.setprofile(seen)  # documents are cut in a thread
    try:
        bank = model.read(documents)
        model.answer(bank, "What is the rent?", decoding=Decoding(3))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return {*seen.functions}


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
    wanted = {"method.compressor.encode", "method.injection.prefill", "method.injection.step"}
    assert wanted <= names


FILES, FILES_UNTIL, FUNCTIONS, CALLS = 36, 30, 356, 9
"""Most files that `sedem ask` passes through, and until injection; most functions once its model
is open, and most calls from it to an equation. A change that makes this longer needs a reason."""


def test_a_question_from_the_command_line_takes_a_short_walk_to_the_equations(
    tmp_path: Path,
) -> None:
    bank, document = str(tmp_path / "a.bank"), str(DOCUMENTS / "harbour-register.txt")
    built, asked = walk("build", bank, document, "-m", SMALL_MODEL), walk("ask", bank, "Who?")
    expected = rows()
    for walked, places in (
        (built, ("3.1, local mean pooling", "3.1, m = h-bar W_in, M_s")),
        (asked, ("3.2, q, k, alpha, MaxSim, s_n", "3.2, top-K", "3.3, a, z, H-hat")),
    ):
        for name in (name for place in places for name in expected[place]):
            assert any(f"{one}.".startswith(f"{name}.") for one in walked.functions), name
    assert len(asked.files) <= FILES
    assert asked.files_until["prefill"] <= FILES_UNTIL
    assert asked.opened is not None and len(asked.opened) <= FUNCTIONS
    assert asked.depths.keys() == {"block_scores", "prefill"}
    assert max(asked.depths.values()) <= CALLS


STEP = re.compile(r"^\| (\d+) \| `([\w.]+)` \|", re.MULTILINE)


def test_the_walk_names_what_a_debugger_meets_in_its_order(tmp_path: Path) -> None:
    bank, document = str(tmp_path / "a.bank"), str(DOCUMENTS / "harbour-register.txt")
    walk("build", bank, document)
    built = walk("build", str(tmp_path / "b.bank"), document)
    asked = walk("ask", bank, "Who is the mayor of Belholm?")
    page = (MAP.parent / "walk.md").read_text(encoding="utf-8")
    until, whole = asked.files_until["prefill"], len(asked.files)
    assert (
        f"through {until} files until the restored states are injected" in page
        and f"through {whole} until" in page
    )
    for part, walked in zip(page.split("\n## ")[1:], (built, asked), strict=True):
        steps = [(name, int(depth)) for depth, name in STEP.findall(part)]
        found = {
            name: depth - walked.functions[steps[0][0]] + 1
            for name, depth in walked.functions.items()
        }
        assert [name for name in found if name in dict(steps)] == [name for name, _ in steps]
        assert [(name, found[name]) for name, _ in steps] == steps
