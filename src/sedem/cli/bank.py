"""The commands of `sedem bank`: list, show, check, edit and warm a bank."""

from __future__ import annotations

from typing import Annotated

import typer

from sedem.cli.models import model_of, open_model
from sedem.cli.options import BankPath, EngineOption, Json, Model
from sedem.cli.output import count, print_facts, print_json, print_table, progress, write

bank_app = typer.Typer(no_args_is_help=True, help="List, show, check, edit and warm a bank.")


@bank_app.command("ls")
def list_documents(bank: BankPath, as_json: Json = False) -> None:
    """List the documents of a bank."""
    import numpy as np

    from sedem.bank.memory_bank import MemoryBank

    opened = MemoryBank.open(bank)
    named = opened.documents
    counts = np.bincount(opened.blocks.documents, minlength=len(named)).tolist()
    documents = [
        {"document": name, "characters": named.characters(index), "blocks": counts[index]}
        for index, name in enumerate(named.names)
    ]
    if as_json:
        print_json(documents)
        return
    rows = [
        (f"{entry['characters']:,}", f"{entry['blocks']:,}", str(entry["document"]))
        for entry in documents
    ]
    print_table(rows, ("characters", "blocks", "document"), left=(2,))


@bank_app.command()
def show(bank: BankPath, as_json: Json = False) -> None:
    """Show a bank's model, size and storage."""
    from sedem.inference.build import describe

    facts = describe(bank)
    if as_json:
        print_json(facts)
    else:
        print_facts(facts.items())


@bank_app.command()
def verify(bank: BankPath) -> None:
    """Check a bank against its checksums."""
    from sedem.bank.store.local import LocalStore

    problems = LocalStore(bank).verify()
    for problem in problems:
        write(f"{bank}: {problem}")
    if problems:
        raise typer.Exit(1)
    write(f"{bank}: all is well")


@bank_app.command("rm")
def remove(
    bank: BankPath,
    document: Annotated[str, typer.Argument(metavar="DOCUMENT", help="Name of the document.")],
) -> None:
    """Remove a document from a bank."""
    from sedem.bank.store.local import LocalStore

    LocalStore(bank).remove(document)
    write(f"{bank}: removed '{document}'")


@bank_app.command()
def warm(
    bank: BankPath,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Round to bfloat16, int8 or fp8. [default: the type the model computes in]",
        ),
    ] = None,
    model: Model = None,
    engine: EngineOption = "auto",
) -> None:
    """Store what the decoder computes of each block, so that answers need not compute it.

    Keys and values of every block are written beside the bank, and answers map them from there.
    That takes many times the bank's own size, which is printed. It needs a model with independent
    blocks. Blocks added later are computed when they are used, until the command is given again.
    """
    from sedem.bank.memory_bank import MemoryBank
    from sedem.engine.warming import save_kept

    opened = MemoryBank.open(bank)
    answering = open_model(model or model_of(bank), engine)
    with progress("warming") as report_progress:
        size = save_kept(answering.engine, opened, dtype, report_progress)
    write(
        f"{bank}: keys and values of {count(len(opened), 'block')} take {size:,} bytes, its memory "
        f"{opened.memory_bytes:,}"
    )
