"""The code of a worker in a Ray cluster: it opens the model, and makes banks of documents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from sedem.bank.file import BankFile
from sedem.bank.memory_bank import Snapshot
from sedem.bank.parts import Entry, Parts, Place, is_remote
from sedem.bank.rows import Meta
from sedem.bank.view import View
from sedem.errors import BankError, SedemError
from sedem.reading.building import build_bank
from sedem.types import Document


@dataclass(frozen=True)
class SentBank:
    """A bank file that a worker sends.

    Attributes:
        content: bytes of the file.
        sha256: their SHA-256.
    """

    content: bytes
    sha256: str

    @classmethod
    def of(cls, path: Path) -> SentBank:
        """Return the bank in a file that has no log."""
        content = path.read_bytes()
        return cls(content, hashlib.sha256(content).hexdigest())

    def open(self) -> Snapshot:
        """Return the bank in RAM.

        Raises:
            BankError: it differs from what the worker sent.
        """
        # In RAM, SQLite does not check pages.
        if hashlib.sha256(self.content).hexdigest() != self.sha256:
            raise BankError(
                "memory was damaged between a worker and this machine (its checksum differs); "
                "build again, and check the network and the memory of both"
            )
        file = BankFile.of_bytes(self.content)
        return Snapshot([View.newest(file)], file)


class Encoder:
    """A worker: it opens the model once, and makes banks of the documents that it is given.

    Args:
        checkpoint: folder or hub id of the model.
        meta: metadata of these banks.
        place: the bank that they become parts of, uploaded from here; None sends them to the
            machine that commits.
        threads: threads of torch on a CPU.
    """

    def __init__(self, checkpoint: str, meta: Meta, place: Place | None, threads: int) -> None:
        self.checkpoint, self.meta, self.place = checkpoint, meta, place
        self.threads = threads
        self.parts: Parts | None = None

    def start(self, version: str) -> str:
        """Open the model and the bank.

        Args:
            version: version of sedem on the machine that commits.

        Returns:
            Why this worker cannot be used, in a sentence; empty if it can.
        """
        from sedem.backbone.bars import hide_bars
        from sedem.model import SeDeM

        host = f"host '{os.uname().nodename}' of the cluster"
        if (installed := version_of("sedem")) != version:
            return (
                f"{host} has sedem {installed}, this machine has {version}; "
                "install the same version on all"
            )
        torch.set_num_threads(self.threads)
        hide_bars()
        try:
            self.model = SeDeM.from_pretrained(self.checkpoint, light=True)
        except (SedemError, OSError) as error:
            return (
                f"{host} cannot open '{self.checkpoint}' ({error}); put it where every host "
                "sees it under the same path, or give a hub id"
            )
        wanted = self.meta.fingerprint
        if (found := self.model.fingerprint()) != wanted:
            return (
                f"{host} has another model at '{self.checkpoint}' ({found[:12]}) than this machine "
                f"({wanted[:12]}); give all hosts the same one"
            )
        return "" if self.place is None else self._open_parts(host, self.place)

    def _open_parts(self, host: str, place: Place) -> str:
        """Open the bank in parts; returns why it cannot be used, empty if it can."""
        try:
            self.parts = Parts(place)
            if self.parts.exists() or is_remote(place):
                return ""
            reason = "it does not exist there"
        except SedemError as error:
            reason = str(error)
        return (
            f"{host} cannot use bank '{place}' ({reason}); put it where every host sees it under "
            "the same path, or give every host access to the object store"
        )

    def encode(self, documents: Sequence[Document]) -> tuple[str, SentBank | Entry | None]:
        """Read documents into a bank of their own.

        Returns:
            Why they cannot be read, in a sentence, empty if they can; and the bank.
        """
        meta = self.meta
        try:
            with TemporaryDirectory() as folder:
                read, piece = Path(folder, "read.bank"), Path(folder, "piece.bank")
                build_bank(
                    self.model,
                    self.model.engine,
                    read,
                    documents,
                    source=meta.made_by.get("model"),
                    dtype=meta.dtype,
                    no_text=not meta.texts,
                    words=meta.words,
                )
                if self.parts is not None:
                    return "", self.parts.publish(BankFile(read))
                # Without the log beside it, and without the connections that the build has left.
                BankFile(read).copy_to(piece)
                return "", SentBank.of(piece)
        except SedemError as error:
            return str(error), None
