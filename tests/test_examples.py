"""Every script of examples/ runs, with sedem-nano, and prints what it promises."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import LEASE, RECIPE
from servers import serving
from serving import SECRET

from sedem import Document, SeDeM
from sedem.demo import DOCUMENTS
from sedem_serve.server.settings import ServerSettings

EXAMPLES = Path(__file__).parents[1] / "examples"
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example as a script in an empty folder and return what it prints."""
    monkeypatch.chdir(tmp_path)

    def run_script(name: str, *arguments: str) -> str:
        path = EXAMPLES / f"{name}.py"
        monkeypatch.setattr("sys.argv", [str(path), *arguments])
        # The small model needs no download.
        code = path.read_text("utf-8").replace("sedem-smol", "sedem-nano")
        exec(compile(code, path, "exec", dont_inherit=True), {"__name__": "__main__"})
        return capsys.readouterr().out

    return run_script


def test_every_example_has_a_test() -> None:
    tested = Path(__file__).read_text("utf-8")
    # That one starts processes of a cluster: tests/scale/test_training.py.
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"train_on_ray"}
    assert names
    assert {name for name in names if f'run("{name}"' not in tested} == set()


def test_ask_a_folder(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "rules").mkdir(parents=True)
    (folder / "lease.txt").write_text(LEASE, "utf-8")
    (folder / "rules" / "cake.md").write_text(RECIPE, "utf-8")
    first = run("ask_a_folder", str(folder), "What is the rent?")
    assert first.startswith("read 2 documents into ")
    assert "What is the rent?\n900" in first and "\n  [1] lease.txt:0-" in first
    again = run("ask_a_folder", str(folder), "What is the rent?")
    assert again == first.partition("\n")[2]


def test_stream(run: Run) -> None:
    lines = run("stream", "What is the weight of shipment HK-2093?").splitlines()
    assert lines[:2] == ["3175 kg", "ended by: end"]
    assert lines[-1].startswith("from: harbour-register.txt:")


def test_batch_questions(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ulysses-spacecraft.txt", "harbour-register.txt"):
        shutil.copy(DOCUMENTS / name, tmp_path)
    monkeypatch.setattr("sedem.demo.DOCUMENTS", tmp_path)
    (tmp_path / "questions").mkdir()
    questions = ["In what year was Ulysses launched?", "Who is the mayor of Belholm?"]
    asked = tmp_path / "questions" / "asked.txt"
    asked.write_text("\n\n".join(questions), "utf-8")
    rows = [json.loads(line) for line in run("batch_questions", str(asked)).splitlines()]
    assert [row["question"] for row in rows] == questions
    assert [row["answer"] for row in rows] == ["1990", "Jonas Wenrick"]
    assert [len(row["citations"]) for row in rows] == [2, 2]


def test_compare_with_full_context(run: Run, tmp_path: Path) -> None:
    lines = run("compare_with_full_context", "out").splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["full-context", "sedem"]
    assert lines[2].startswith("sedem minus full-context: +")
    assert (tmp_path / "out" / "sedem" / "metrics.json").is_file()


@pytest.mark.parametrize("framework", ["langchain_core", "llama_index.core"])
def test_retrievers(run: Run, tmp_path: Path, framework: str) -> None:
    pytest.importorskip(framework)
    model = SeDeM.from_pretrained("sedem-nano")
    model.read([Document("lease.txt", LEASE)]).save(tmp_path / "lease.bank")
    words = "lease.bank", "What is the rent?"
    if framework == "langchain_core":
        printed = run("langchain_retriever", *words)
    else:
        printed = run("llama_index_retriever", *words)
    place = re.match(r"\{'document': 'lease.txt', 'start': (\d+), 'end': (\d+), ", printed)
    assert place is not None, printed
    start, end = map(int, place.groups())
    assert printed.splitlines()[0].endswith(LEASE[start:end][:60])


def test_ask_the_server(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SeDeM.from_pretrained("sedem-nano")
    model.read([Document("lease.txt", LEASE)]).save(tmp_path / "lease.bank")
    settings = ServerSettings(folder=tmp_path / "server", banks={"lease": tmp_path / "lease.bank"})
    with serving(settings, model) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.api)
        monkeypatch.setenv("OPENAI_API_KEY", SECRET)
        lines = run("ask_the_server", "lease", "What is the rent?").splitlines()
    assert lines[0].startswith("[1] lease.txt:0-")
    assert any("900" in line for line in lines)
    assert lines[-1].startswith("from ") and lines[-1].endswith(" blocks")
