"""What sedem needs a GPU for, without network: `python -m experiments.gpu --data DIR --out OUT`.

It runs the tests marked gpu, compares the engines, times Llama's shapes on random weights, and
trains sedem-smol until the time is up. The same command resumes where a call stopped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import chdir
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments.speed import batches, performance
from experiments.system.measures import measure_missing
from experiments.system.scales import GPU, ROOT, SHIPPED
from sedem import SeDeM
from sedem.demo import DOCUMENTS, QUESTIONS
from sedem.engine.static import ENGINES
from sedem.errors import ConfigError
from sedem.reading.documents import read_documents
from sedem_lab.evaluation.results import write_json
from sedem_lab.provenance import provenance

Step = StrEnum("Step", "TESTS PARITY BENCH TRAIN")
"""What the script does, in this order."""
STAGES = ("stage1-regress", "stage1", "stage2")
"""The recipes of sedem-smol; each starts from the previous one."""
SEDEM = (sys.executable, "-c", "from sedem.cli.main import app; app()")
"""The command `sedem`, which need not be installed."""
TOLERANCE = 1e-3
"""Maximum difference of two scores per token of the question, over which a score is summed.

Slots are stored in bfloat16. With another summation order, a value may round to a neighbour.
"""


def tests() -> dict[str, Any]:
    """Run the tests marked gpu."""
    subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu"], cwd=ROOT, check=True)
    return provenance()


def parity(device: str = "cuda") -> dict[str, Any]:
    """Compare scores and answers of the engines on a device with the reference on a CPU."""

    def asked(device: str, engine: str) -> tuple[torch.Tensor, list[str]]:
        """Scores of every block for every question, per token of the question, and the answers."""
        options = {"dtype": torch.float32, "device": device, "engine": engine}
        model = SeDeM.from_pretrained(SHIPPED, **options)
        memory = model.read(read_documents(sorted(DOCUMENTS.glob("*.txt"))))
        tokens = [len(model.encoder.token_ids(question)) for question in QUESTIONS]
        scores = [model.scores(memory, q) / n for q, n in zip(QUESTIONS, tokens, strict=True)]
        ways = [model.answer(memory, QUESTIONS, answer=how) for how in ("free", "span")]
        return torch.stack(scores), [answer.text for answers in ways for answer in answers]

    expected_scores, expected = asked("cpu", "eager")
    left_out = ("auto",) if device == "cuda" else ("auto", "graphs")
    found: dict[str, dict[str, float]] = {}
    for engine in (engine for engine in ENGINES if engine not in left_out):
        scores, answers = asked(device, engine)
        found[engine] = row = {
            "score_difference": (scores - expected_scores).abs().max().item(),
            "other_answers": sum(a != b for a, b in zip(answers, expected, strict=True)),
        }
        if row["other_answers"] or row["score_difference"] > TOLERANCE:
            raise ConfigError(
                f"engine '{engine}' on {device} differs from the reference on the CPU: {row}; it "
                "must not be used there until the cause is found"
            )
    return {"engines": found, "questions": len(QUESTIONS), **provenance(torch.device(device))}


def train(end: float, overrides: Sequence[str]) -> bool:
    """Train sedem-smol until this time of `time.monotonic`, and return whether it is finished."""
    for name in STAGES:
        if Path("runs", "smol", name, "training.json").is_file():
            continue
        command = [*SEDEM, "train", f"smol/{name}"]
        command += [word for override in overrides for word in ("--set", override)]
        try:
            subprocess.run(command, timeout=max(0, end - time.monotonic()), check=True)
        except subprocess.TimeoutExpired:
            return False
    return True


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {"tests": tests, "parity": parity}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of runs and results.")],
    data: Annotated[Path, typer.Option(help="Folder of the data files.")] = Path("data"),
    seconds: Annotated[float, typer.Option(help="Stop training after so long.")] = 540,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override of every recipe; repeatable.")
    ] = None,
    steps: Annotated[list[Step] | None, typer.Argument(help="What to do. [default: all]")] = None,
) -> None:
    """Do what is missing. The exit status is 75 if training needs another call."""
    end = time.monotonic() + seconds
    if not torch.cuda.is_available():
        sys.exit("Error: this machine has no GPU that torch can use, and one is needed")
    data = data.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with chdir(out):  # runs are relative to the working folder
        for step in steps or Step:
            result = GPU.runs / "results" / f"{step}.json"
            if step == "bench":
                if measure_missing([performance, batches], GPU, data)[1]:
                    raise typer.Exit(1)
            elif step == "train":
                if not train(end, [f"data_root={data}", *(overrides or ())]):
                    typer.echo("repeat the command to resume")
                    raise typer.Exit(os.EX_TEMPFAIL)
            elif not result.is_file():
                found = CHECKS[step]()
                result.parent.mkdir(parents=True, exist_ok=True)
                write_json(result, found)


if __name__ == "__main__":
    app()
