"""A bank that is built on several hosts, of which one is lost in the middle."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from conftest import LEASE, RECIPE, save_tiny
from scale.hosts import Cluster

from sedem import Document, MemoryBank, SeDeM, SedemConfig
from sedem.backbone.loading import open_backbone
from sedem.ray.build import Workers, build_on_ray
from sedem.ray.sources import Sources
from sedem.reading import building as building

DOCUMENTS = 120
CHARACTERS = 3000
"""Of each document."""


def write_checkpoint(folder: Path) -> str:
    """Write a tiny untrained model."""
    encoder = save_tiny(folder / "backbone")
    config = SedemConfig(
        encoder=encoder,
        extract_layers=(3,),
        inject_layer=2,
        segment_length=16,
        compression=4,
        lora_rank=4,
        lora_alpha=8,
    )
    opened = open_backbone(encoder)
    SeDeM(config, opened, opened).eval().save_pretrained(folder / "model")
    return str(folder / "model")


def write_documents(folder: Path, count: int = DOCUMENTS) -> list[Document]:
    """Write text files that differ, and return them as documents in the order of their names."""
    folder.mkdir()
    text = f"{LEASE}\n\n{RECIPE}\n\n" * (1 + CHARACTERS // len(LEASE + RECIPE))
    documents = []
    for number in range(count):
        path = folder / f"{number:04d}.txt"
        path.write_text(f"Number {number}. {text[number:][:CHARACTERS]}", encoding="utf-8")
        documents.append(Document(str(path), path.read_text(encoding="utf-8")))
    return documents


@dataclass
class Loss:
    """Loses a host when a number of commits is done.

    Attributes:
        cluster: of the host.
        after: commits.
        commits: that are done.
        speed: tokens that the last build has read a second.
        busy: processes of the host when it was lost.
    """

    cluster: Cluster
    after: int | None
    commits: int = 0
    speed: float = 0.0
    busy: list[int] = field(default_factory=list)

    def __call__(self, done: int, total: int, speed: float) -> None:
        """Count a commit."""
        self.commits, self.speed = self.commits + 1, speed
        if self.commits == self.after:
            host = next(host for host in self.cluster.hosts if host.alive)
            self.busy = host.processes()
            host.kill()


def build_and_lose(
    cluster: Cluster, checkpoint: str, folder: Path, bank: Path, after: int | None
) -> Loss:
    """Build a bank on the hosts of a cluster; one of them is lost after some commits.

    Args:
        cluster: to which this process is connected.
        checkpoint: of the model.
        folder: of the documents.
        bank: the new bank.
        after: commits after which a host is lost; None loses none.
    """
    loss = Loss(cluster, after)
    model = SeDeM.from_pretrained(checkpoint, light=True)
    workers = Workers(cluster.address, checkpoint)
    build_on_ray(model, workers, bank, Sources([str(folder)]), loss, source="tiny")
    return loss


def build_alone(checkpoint: str, documents: list[Document], bank: Path) -> None:
    """Build the same bank on this machine."""
    model = SeDeM.from_pretrained(checkpoint, light=True)
    building.build_bank(model, model.engine, bank, documents, source="tiny")


def differences(bank: Path, other: Path) -> list[str]:
    """What differs between two banks, a sentence each; empty if they are the same to the bit."""
    found, wanted = MemoryBank.open(bank), MemoryBank.open(other)
    compared = {
        "metadata": found.meta == wanted.meta,
        "documents": found.documents == wanted.documents,
        "blocks": list(found.blocks) == list(wanted.blocks),
    }
    if len(found) == len(wanted):
        every = range(len(wanted))
        compared["memory"] = found.memory(every).equal(wanted.memory(every))
    return [
        f"the {what} of '{bank}' and '{other}' differ"
        for what, same in compared.items()
        if not same
    ]
