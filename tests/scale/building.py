"""A bank that is built on several hosts, of which one is lost in the middle."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from conftest import LEASE, RECIPE, save_tiny, small_config
from scale.hosts import Cluster

from sedem import Document, MemoryBank, SeDeM
from sedem.backbone.loading import open_backbone
from sedem.bank.file import Place
from sedem.bank.memory_bank import store_at
from sedem.reading import building as building
from sedem_serve.ray.build import Workers, build_on_ray
from sedem_serve.ray.sources import Sources

CHARACTERS = 3000
"""Of each document."""


def write_checkpoint(folder: Path) -> str:
    """Write a tiny untrained model."""
    encoder = save_tiny(folder / "backbone")
    opened = open_backbone(encoder)
    SeDeM(small_config(encoder), opened, opened).eval().save_pretrained(folder / "model")
    return str(folder / "model")


def write_documents(folder: Path, number: int) -> list[Document]:
    """Write text files that differ, and return them as documents in the order of their names."""
    folder.mkdir()
    text = f"{LEASE}\n\n{RECIPE}\n\n" * (1 + CHARACTERS // len(LEASE + RECIPE))
    documents = []
    for one in range(number):
        path = folder / f"{one:04d}.txt"
        path.write_text(f"Number {one}. {text[one:][:CHARACTERS]}", encoding="utf-8")
        documents.append(Document(str(path), path.read_text(encoding="utf-8")))
    return documents


def build_and_lose(
    cluster: Cluster, checkpoint: str, folder: Path, bank: Path, after: int
) -> list[int]:
    """Build a bank on the hosts of a cluster, to which this process is connected, and lose one.

    Args:
        cluster: the cluster.
        checkpoint: of the model.
        folder: of the documents.
        bank: the new bank.
        after: commits after which a host is lost.

    Returns:
        Processes of the host when it was lost.
    """
    commits, busy = count(1), list[int]()

    def lose(*_: object) -> None:
        if next(commits) == after:
            host = next(host for host in cluster.hosts if host.alive)
            busy.extend(host.processes())
            host.kill()

    model = SeDeM.from_pretrained(checkpoint)
    workers = Workers(cluster.address, checkpoint)
    build_on_ray(model, workers, bank, Sources([str(folder)]), lose, source="tiny")
    return busy


def build_alone(checkpoint: str, documents: list[Document], bank: Path) -> None:
    """Build the same bank on this machine."""
    model = SeDeM.from_pretrained(checkpoint)
    building.build_bank(model, model.engine, bank, documents, source="tiny")


def differences(bank: Place, other: Place) -> list[str]:
    """What differs between two banks, a sentence each; empty if they are the same to the bit."""
    found, wanted = MemoryBank.open(bank), MemoryBank.open(other)
    compared = {
        "metadata": found.meta == wanted.meta,
        "documents": found.documents == wanted.documents,
        "blocks": list(found.blocks) == list(wanted.blocks),
        "words": _words(bank) == _words(other) > 0,
    }
    if len(found) == len(wanted):
        every = range(len(wanted))
        compared["memory"] = found.memory(every).equal(wanted.memory(every))
    return [
        f"the {what} of '{bank}' and '{other}' differ"
        for what, same in compared.items()
        if not same
    ]


def _words(bank: Place) -> int:
    """Number of blocks whose words are indexed."""
    total = 0
    for file in store_at(bank).files():
        with file.reading() as connection:
            query = "SELECT count(*) FROM words WHERE words MATCH 'a*'"
            total += connection.execute(query).fetchone()[0]
    return total
