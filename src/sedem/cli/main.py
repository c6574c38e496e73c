"""The command line. Every verb imports what it needs itself, so that --help is instant."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from sedem.cli import bench, data, evaluate, options, output
from sedem.config import DEFAULT_MODEL
from sedem.errors import BankError, SedemError

if TYPE_CHECKING:
    from sedem.model import SeDeM


class Verbs(TyperGroup):
    """Turns errors that sedem raises on purpose into one line and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run a verb."""
        try:
            return super().invoke(ctx)
        except SedemError as error:
            typer.echo(f"error: {output.printable(str(error))}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Read documents once into a bank of hidden-state memories, then ask it any question.",
)
bank_app = typer.Typer(no_args_is_help=True, help="Look into a bank, check it, take documents out.")
train_app = typer.Typer(
    cls=evaluate.MethodOrVerb,
    no_args_is_help=True,
    rich_markup_mode=None,
    subcommand_metavar="stage1|stage2|METHOD ...",
    help="Train a model from a recipe: a stage of SeDeM, or a baseline.",
)
app.add_typer(bank_app, name="bank")
app.add_typer(train_app, name="train")
app.add_typer(data.data_app, name="data")
app.add_typer(evaluate.eval_app, name="eval")

BankPath = Annotated[Path, typer.Argument(metavar="BANK", help="Folder of the bank.")]
Question = Annotated[
    str | None,
    typer.Argument(metavar="QUESTION", help="Without one, they come one a line from stdin."),
]
DocumentName = Annotated[str, typer.Argument(metavar="DOCUMENT", help="Name of the document.")]
Model = options.Model
Json = options.Json
BudgetOption = options.BudgetOption
EngineOption = options.EngineOption
RecipeOption = Annotated[Path, typer.Option("--config", help="The recipe, a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one value, such as run.output=DIR."),
]
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config", help="Print the whole recipe, --set applied, and train nothing."
    ),
]


@app.command()
def demo(k: BudgetOption = None) -> None:
    """Build a bank from bundled documents, ask it questions, print answers and their sources."""
    from sedem.data.documents import read_documents
    from sedem.demo import DOCUMENTS, QUESTIONS

    model = _open_model(DEFAULT_MODEL)
    documents = [
        type(document)(Path(document.name).name, document.text)
        for document in read_documents(sorted(DOCUMENTS.glob("*.txt")))
    ]
    with output.progress("reading") as report_progress:
        bank = model.read(documents, progress=report_progress)
    typer.echo(
        f"read {output.count(len(documents), 'document')}, "
        f"{sum(len(d.text) for d in documents):,} characters, "
        f"into {output.count(len(bank), 'block')}\n"
    )
    for question in QUESTIONS:
        typer.echo(f"? {question}")
        output.print_answer(model, bank, question, options.budget(k))
    typer.echo("sedem-nano is a small model and often wrong; the spans it answered from are exact.")


@app.command()
def build(
    bank: BankPath,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help=".txt and .md files.")],
    model: Model = None,
    encoding: Annotated[str, typer.Option(help="Encoding of the files.")] = "utf-8",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="What a new bank stores slots as: bfloat16, int8 or fp8. [default: bfloat16]"
        ),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            help="Also keep the selector's keys, as bfloat16, int8 or fp8: larger, asked sooner."
        ),
    ] = None,
) -> None:
    """Read files into a bank; it is created if it is not there, extended if it is.

    Files that the bank already holds unchanged are passed over, changed ones are replaced. Each
    commit is durable: a build that was killed goes on when it is started again.
    """
    from sedem.data.documents import read_documents

    documents = read_documents(files, encoding)
    from sedem.inference.build import build_bank

    opened = _open_model(model or _model_of(bank))
    with output.progress("reading") as report_progress:
        report = build_bank(
            opened,
            opened.engine,
            bank,
            documents,
            report_progress,
            source=opened.source,
            dtype=dtype,
            keys=keys,
        )
    typer.echo(
        f"{bank}: {report.added} added, {report.replaced} replaced, {report.unchanged} unchanged; "
        f"the bank holds {output.count(report.documents, 'document')} "
        f"in {output.count(report.blocks, 'block')}"
    )


@app.command()
def ask(
    bank: BankPath,
    question: Annotated[
        str | None,
        typer.Argument(
            metavar="QUESTION", help="Without it, questions come one a line from stdin."
        ),
    ] = None,
    k: BudgetOption = None,
    as_json: Json = False,
    model: Model = None,
    max_new_tokens: Annotated[int, typer.Option(help="Limit of the answer in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy; above, sample.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    engine: EngineOption = "auto",
) -> None:
    """Ask a bank; the answer comes with the spans of the documents that it was conditioned on."""
    budget = options.budget(k)
    from sedem.bank.memory_bank import MemoryBank
    from sedem.inference.generation import Decoding

    decoding = Decoding(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    opened = MemoryBank.open(bank)
    answering = _open_model(model or _model_of(bank), engine)
    opened.check_made_by(answering.fingerprint())
    for one in [question] if question is not None else output.questions_from_stdin():
        if as_json:
            answer = answering.answer(opened, one, k=budget, decoding=decoding)
            typer.echo(json.dumps(answer.to_dict(), ensure_ascii=False))
        else:
            output.print_answer(answering, opened, one, budget, decoding)


@bank_app.command("ls")
def bank_ls(bank: BankPath, as_json: Json = False) -> None:
    """List the documents of a bank."""
    from sedem.bank.memory_bank import MemoryBank

    opened = MemoryBank.open(bank)
    counts = [0] * len(opened.documents)
    for block in opened.blocks:
        counts[block.document] += 1
    rows = [
        {"document": document.name, "characters": len(document.text), "blocks": count}
        for document, count in zip(opened.documents, counts, strict=True)
    ]
    if as_json:
        typer.echo(json.dumps(rows, ensure_ascii=False))
        return
    for row in rows:
        typer.echo(
            f"{row['characters']:>12,} characters {row['blocks']:>6} blocks  "
            f"{output.printable(str(row['document']))}"
        )


@bank_app.command("show")
def bank_show(bank: BankPath, as_json: Json = False) -> None:
    """Show which model made a bank, and how large it is."""
    from sedem.inference.build import describe

    facts = describe(bank)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        typer.echo(output.printable(f"{name.replace('_', ' '):<18} {shown}"))


@bank_app.command("verify")
def bank_verify(bank: BankPath) -> None:
    """Read every byte of a bank and compare it with its checksums."""
    from sedem.bank.store.local import LocalStore

    problems = LocalStore(bank).verify()
    for problem in problems:
        typer.echo(f"{bank}: {problem}")
    if problems:
        raise typer.Exit(1)
    typer.echo(f"{bank}: all is well")


@bank_app.command("rm")
def bank_rm(
    bank: BankPath,
    document: Annotated[str, typer.Argument(metavar="DOCUMENT", help="Name of the document.")],
) -> None:
    """Take a document out of a bank."""
    from sedem.bank.store.local import LocalStore

    LocalStore(bank).remove(document)
    typer.echo(f"{bank}: removed '{document}'")


@train_app.command("stage1")
def train_stage1(
    config: RecipeOption, overrides: Overrides = None, print_config: PrintConfig = False
) -> None:
    """Train compressor and decompressor on plain text; a killed run goes on when started again."""
    _train_stage("stage1", config, overrides, print_config)


@train_app.command("stage2")
def train_stage2(
    config: RecipeOption, overrides: Overrides = None, print_config: PrintConfig = False
) -> None:
    """Train selection and answering on questions; a killed run goes on when started again."""
    _train_stage("stage2", config, overrides, print_config)


@train_app.command(evaluate.METHOD)
def train_method(
    context: typer.Context,
    config: RecipeOption,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
) -> None:
    """Train a baseline on text or on questions; a killed run goes on when started again."""
    from sedem.training.baseline import train_baseline
    from sedem.training.baseline_recipe import load_baseline_recipe

    recipe = load_baseline_recipe(str(context.info_name), config, overrides or ())
    _train(recipe, train_baseline, print_config)


app.command()(evaluate.cost)
app.command()(bench.bench)


def _open_model(name: str, engine: str = "auto") -> SeDeM:
    from transformers.utils.logging import disable_progress_bar

    from sedem.model import SeDeM

    disable_progress_bar()
    return SeDeM.from_pretrained(name, engine=engine)


def _model_of(bank: Path) -> str:
    """The model that made a bank; the default for a bank that is yet to be made.

    A bank may come from anybody, so the model that it names is opened only if it ships with sedem.

    Raises:
        BankError: the bank names another model.
    """
    from sedem.bank.memory_bank import MemoryBank
    from sedem.inference.checkpoint import embedded

    if not bank.exists():
        return DEFAULT_MODEL
    claimed = str(MemoryBank.open(bank).made_by.get("model") or DEFAULT_MODEL)
    # The folder, since one of the same name here would be opened in its place.
    if (shipped := embedded(claimed)) is not None:
        return str(shipped)
    raise BankError(
        f"bank '{bank}' says that it was built by model '{claimed}'; sedem follows a bank's word "
        f"only for models that come with it; give -m {shlex.quote(claimed)} if you trust it"
    )


def _train_stage(stage: str, config: Path, overrides: list[str] | None, print_config: bool) -> None:
    from sedem.training.recipe import load_recipe
    from sedem.training.stages import STAGES

    kind, train = STAGES[stage]
    _train(load_recipe(kind, config, overrides or ()), train, print_config)


def _train(recipe: Any, train: Callable[[Any], Path], print_config: bool) -> None:
    """Run a recipe and print the folder of its final checkpoint, or print the recipe alone."""
    import logging

    from sedem.training.recipe import as_yaml

    if print_config:
        typer.echo(as_yaml(recipe), nl=False)
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    typer.echo(str(train(recipe)))
