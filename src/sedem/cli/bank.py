"""The commands of `sedem bank`: list, show, check and edit a bank."""

from __future__ import annotations

from typing import Annotated

import typer

from sedem.cli.options import BankPath, Json
from sedem.cli.output import print_facts, print_json, print_table, write

bank_app = typer.Typer(no_args_is_help=True, help="List, show, check and edit a bank.")


@bank_app.command("ls")
def list_documents(bank: BankPath, as_json: Json = False) -> None:
    """List the documents of a bank."""
    from sedem.bank.memory_bank import MemoryBank

    opened = MemoryBank.open(bank)
    counts = [0] * len(opened.documents)
    for block in opened.blocks:
        counts[block.document] += 1
    documents = [
        {"document": document.name, "characters": len(document.text), "blocks": count}
        for document, count in zip(opened.documents, counts, strict=True)
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
