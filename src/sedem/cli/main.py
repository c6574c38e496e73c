"""The `sedem` command: demo and ask; the other commands have modules of their own.

Each command imports what it needs when it runs, so `--help` is fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from sedem.cli import (
    adapt,
    bench,
    build,
    calibrate,
    cost,
    data,
    evaluate,
    init,
    output,
    probe,
    push,
    seal,
    serve,
    train,
)
from sedem.cli import bank as bank_commands
from sedem.cli.models import model_of, open_model
from sedem.cli.options import (
    BankPlace,
    BudgetOption,
    ConditionOption,
    EngineOption,
    Json,
    Model,
    WeightsOption,
    budget,
)
from sedem.config import DEFAULT_MODEL
from sedem.errors import DataError, SedemError

if TYPE_CHECKING:
    from sedem.bank.memory_bank import MemoryBank
    from sedem.model import SeDeM

ORDER = (
    "demo", "build", "ask", "bank", "data", "init", "probe", "adapt", "train", "calibrate", "seal",
    "push", "eval", "bench", "cost", "serve",
)  # fmt: skip
"""The commands as the help lists them."""


class Commands(TyperGroup):
    """Reports errors of sedem and of the system as one line, with exit code 1."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands in the order of the help."""
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except SedemError as error:
            output.error(str(error))
            raise typer.Exit(1) from None
        except BrokenPipeError:
            raise
        except OSError as error:
            # Such as a full disk, a name that is too long or a folder that may not be read.
            place = f"'{error.filename}': " if error.filename else ""
            output.error(f"{place}{error.strerror or error}")
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Read documents once into a memory bank, then answer questions from it.",
)
app.add_typer(bank_commands.bank_app, name="bank")
app.add_typer(data.data_app, name="data")
app.add_typer(train.train_app, name="train")
app.add_typer(evaluate.eval_app, name="eval")
app.command()(build.build)
app.command()(init.init)
app.command()(probe.probe)
app.command()(adapt.adapt)
app.command()(calibrate.calibrate)
app.command()(seal.seal)
app.command()(push.push)
app.command()(bench.bench)
app.command()(cost.cost)
app.command()(serve.serve)


@app.command()
def demo(k: BudgetOption = None) -> None:
    """Read bundled documents and ask about them."""
    from sedem.data.documents import read_documents
    from sedem.demo import DOCUMENTS, QUESTIONS

    model = open_model(DEFAULT_MODEL)
    documents = [
        type(document)(Path(document.name).name, document.text)
        for document in read_documents(sorted(DOCUMENTS.glob("*.txt")))
    ]
    with output.progress("reading") as report_progress:
        bank = model.read(documents, progress=report_progress)
    output.write(
        f"read {output.count(len(documents), 'document')}, "
        f"{sum(len(d.text) for d in documents):,} characters, "
        f"into {output.count(len(bank), 'block')}"
    )
    output.write()
    for question in QUESTIONS:
        output.write(f"? {question}")
        output.print_answer(model, bank, question, budget(k))
    output.write(
        "sedem-nano is a small model and often wrong; the spans it answered from are exact."
    )


@app.command()
def ask(
    bank: BankPlace,
    question: Annotated[
        str | None,
        typer.Argument(metavar="QUESTION", help="Without it, one question a line from stdin."),
    ] = None,
    k: BudgetOption = None,
    condition: ConditionOption = None,
    min_confidence: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Decline to answer if the confidence, from 0 to 1, is below X.",
        ),
    ] = None,
    document: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Answer from this document of the bank alone; repeatable."
        ),
    ] = None,
    as_json: Json = False,
    model: Model = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Limit of an answer in tokens.")
    ] = 64,
    temperature: Annotated[
        float, typer.Option(metavar="X", help="0 decodes greedily; more samples.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of sampling.")] = 0,
    engine: EngineOption = "auto",
    weights: WeightsOption = "full",
) -> None:
    """Answer questions from a bank, with sources.

    The sources are the spans that the answer was conditioned on. Control characters are shown as
    escapes; --json has every text exactly. A question on stdin that cannot be asked is reported,
    the others are answered, and the exit status is 1.
    """
    chosen_k = budget(k)
    from sedem.answering.decoding import Decoding
    from sedem.bank.memory_bank import MemoryBank
    from sedem.data.documents import source_text

    decoding = Decoding(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    opened = MemoryBank.open(bank, source=source_text)
    answering = open_model(model or model_of(bank), engine, weights)
    opened.check_made_by(answering.fingerprint())
    options: dict[str, Any] = {
        "k": chosen_k,
        "decoding": decoding,
        "condition": condition,
        "min_confidence": min_confidence,
        "documents": document or None,
    }
    if question is not None:
        _answer(answering, opened, question, as_json, **options)
        return
    failed = False
    for number, one in enumerate(output.questions_from_stdin(), start=1):
        try:
            _answer(answering, opened, one, as_json, **options)
        except DataError as error:
            # A bad question of a batch costs itself alone.
            failed = True
            output.error(f"question {number}: {error}")
            if as_json:
                output.print_json({"question": one, "error": str(error)})
    if failed:
        raise typer.Exit(1)


def _answer(model: SeDeM, bank: MemoryBank, question: str, as_json: bool, **options: Any) -> None:
    """Answer a question and write the answer."""
    if as_json:
        output.print_json(model.answer(bank, question, **options).to_dict())
    else:
        output.print_answer(model, bank, question, **options)
