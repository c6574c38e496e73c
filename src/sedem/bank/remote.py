"""A bank in parts, for many machines and object stores; docs/bank-format.md.

It is a folder, or a place in an object store, of part files and one manifest that lists them. A
part is a bank of its own that never changes, so readers need no lock. A document is in one part. To
replace or remove it, its part is written again without it.

Parts are published first, then the manifest is replaced, but only if nobody else has done so since
it was read; otherwise the change is made again, on top of the other one. What a killed writer has
published is no part of the bank.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sedem.bank.blocks import Blocks
from sedem.bank.buckets import LIMIT, WRONG_TAG, Bucket, Folder, Tag
from sedem.bank.database import WAIT, connect, database_errors
from sedem.bank.file import (
    BankFile,
    Compacted,
    already_there,
    check_fingerprint,
    delete,
    unknown_document,
)
from sedem.bank.manifest import (
    MANIFEST,
    PART_NAME,
    Entry,
    Manifest,
    PartFile,
    cache_folder,
    temporary,
)
from sedem.bank.rows import Meta, text_digest
from sedem.bank.view import View
from sedem.errors import BankError
from sedem.quantization import Quantized
from sedem.types import Document

PART_BYTES = 2**30
"""Size up to which neighbouring parts are merged."""
KEEP = timedelta(days=1)
"""How long files stay that the newest manifest does not list: some have opened an earlier one, and
others are published before their commit."""
Change = Callable[[Sequence[Entry]], Sequence[Entry]]
"""Returns the new parts of a bank; it is called again if another writer comes first."""


class Parts:
    """The store of a bank in parts; it has the methods of `BankFile`, and threads may share it.

    Every method raises a BankError if the bank is missing or damaged, or the store cannot be used.
    Changes also raise one if other writers come first for `wait` seconds.

    Args:
        place: a folder, or a place in an object store such as "s3://bucket/folder".
        wait: seconds for which a commit is repeated.
    """

    def __init__(self, place: str | Path, wait: float = WAIT) -> None:
        is_url = isinstance(place, str) and "://" in place
        self.bucket = Bucket(str(place)) if is_url else Folder(Path(place))
        self.place, self.wait = place, wait
        self._changing = threading.RLock()
        self._staged: BankFile | None = None
        self._files: dict[str, PartFile] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has its own connections, its own cache and its own working folder.
        place = self.place if isinstance(self.bucket, Bucket) else self.bucket.path
        return Parts, (place, self.wait)

    def __str__(self) -> str:
        return str(self.bucket)

    def exists(self) -> bool:
        """Whether there is a bank."""
        return self.bucket.load(MANIFEST) is not None

    def manifest(self) -> Manifest:
        """Return the newest manifest."""
        return self._newest()[0]

    def _newest(self) -> tuple[Manifest, Tag]:
        found = self.bucket.load(MANIFEST)
        if found is None:
            raise BankError(
                f"bank '{self}' does not exist; create it with 'sedem build {self} FILE...'"
            )
        return Manifest.parse(found[0], str(self)), found[1]

    def files(self) -> list[PartFile]:
        """Return the parts; those that have not changed are the same objects as before."""
        self._files = {entry.name: self._file(entry) for entry in self.manifest().parts}
        return [*self._files.values()]

    def _file(self, entry: Entry) -> PartFile:
        known = self._files.get(entry.name)
        return known if known and known.entry == entry else PartFile(self.bucket, entry)

    def meta(self) -> Meta:
        """Return the bank-wide metadata."""
        return self.manifest().parts[0].meta

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(entry.bytes for entry in self.manifest().parts)

    @property
    def work(self) -> Path:
        """Folder of files that this machine writes."""
        if isinstance(self.bucket, Folder):
            return self.bucket.path / ".work"
        return cache_folder() / "work" / hashlib.sha256(str(self).encode()).hexdigest()[:32]

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each document's text by name; every part is read."""
        return {name: digest for file in self.files() for name, digest in file.digests().items()}

    def _held(self, parts: Sequence[Entry], names: Collection[str]) -> dict[str, str]:
        """Return the SHA-256 of the texts of those documents that some parts have."""
        found: dict[str, str] = {}
        for entry in parts if names else ():
            with self._file(entry).reading() as connection:
                found |= connection.execute(
                    "SELECT name, sha256 FROM documents WHERE added NOT NULL AND removed IS NULL "
                    "AND name IN (SELECT value FROM json_each(?))",
                    (json.dumps([*names]),),
                )
        return found

    def unfinished(self) -> list[str]:
        """Return the names of documents whose reading was interrupted on this machine."""
        found = sorted((self.work / "unfinished").glob("*.bank"))
        return [name for path in found for name in BankFile(path).unfinished()]

    def stored_part(self, document: Document) -> int:
        """Return how many blocks of an unfinished document this machine has."""
        file = self._unfinished(document)
        return file.stored_part(document) if file.exists() else 0

    def _unfinished(self, document: Document) -> BankFile:
        about = [asdict(self.meta()), document.name, text_digest(document.text), document.pages]
        name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
        return BankFile(self.work / "unfinished" / f"{name}.bank", self.wait)

    @contextmanager
    def creating(self, meta: Meta) -> Iterator[Parts]:
        """Create the bank; it appears, with what was added, when the block ends."""
        if self.exists():
            raise already_there(self)
        with self._collecting(meta, lambda file: self.start([self.publish(file)])):
            yield self

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Collect everything that is appended, and add it as one part in one commit."""
        with self._changing:
            if self._staged is not None:
                yield
                return
            with self._collecting(self.meta(), self._commit_file):
                yield

    @contextmanager
    def _collecting(self, meta: Meta, finish: Callable[[BankFile], None]) -> Iterator[None]:
        """Collect what is appended in a file, and call `finish` with it."""
        with self._changing, temporary(self.work) as path:
            file = BankFile(path)
            # Messages are about the bank, not about the file that becomes a part of it.
            file.name = str(self)
            try:
                with file.creating(meta):
                    self._staged = file
                    yield
            finally:
                self._staged = None
            finish(file)

    def append(
        self, fingerprint: str, documents: Sequence[Document], blocks: Blocks,
        memory_NJD: Quantized,
    ) -> None:  # fmt: skip
        """Add documents and their blocks; see `BankFile.append`."""
        with self.writing():
            assert self._staged is not None
            self._staged.append(fingerprint, documents, blocks, memory_NJD)

    def append_part(
        self, fingerprint: str, document: Document, blocks: Blocks, memory_NJD: Quantized,
        *, before: int, last: bool,
    ) -> None:  # fmt: skip
        """Add a part of a long document; they are in a file on this machine until the last one."""
        meta, what = self.meta(), (fingerprint, document, blocks, memory_NJD)
        check_fingerprint(str(self), meta.fingerprint, fingerprint)
        file = self._unfinished(document)
        assert file.path is not None
        with self._changing:
            if not file.exists():
                with file.creating(meta):
                    pass
            if not last:
                file.append_part(*what, before=before, last=False)
                return
            # In a copy: if the commit fails, only the last part is read again.
            with temporary(self.work) as path:
                file.copy_to(path)
                BankFile(path).append_part(*what, before=before, last=True)
                self._commit_file(BankFile(path))
            file.close()
            delete(file.path)

    def _commit_file(self, file: BankFile) -> None:
        """Make a file a part, without documents that the bank has with the same text."""
        digests = file.digests()
        known = self._held(self.manifest().parts, digests)
        file.remove(*(name for name in digests if digests[name] == known.get(name)))
        if file.head().documents:
            self.commit([self.publish(file)], file.digests())

    def remove(self, *names: str) -> None:
        """Remove documents in one commit; see `BankFile.remove`."""
        known = self._held(self.manifest().parts, names)
        for name in names:
            if name not in known:
                raise unknown_document(f"'{self}'", name, [*self.digests()])
        self.commit([], names)

    def publish(self, file: BankFile | Path) -> Entry:
        """Upload a bank as a part, on any machine, without its removed and unfinished documents.

        Returns its entry for the manifest. If no commit lists the part, `compact` deletes it.
        """
        with temporary(self.work) as path:
            (BankFile(file) if isinstance(file, Path) else file).copy_to(path)
            part = BankFile(path)
            part.compact()
            head, meta = part.head(), part.meta()
            part.close()
            with database_errors(part), closing(connect(path)) as connection:
                # All of it is in the file itself from now on.
                connection.pragma("journal_mode", "delete")
            entry = Entry.of(path, head, meta)
            self.bucket.upload(entry.name, path)
            if isinstance(self.bucket, Bucket):
                path.replace(self._file(entry).place)
        return entry

    def start(self, parts: Sequence[Entry]) -> None:
        """Create the bank of published parts, unless a bank exists there."""
        if not self.bucket.replace(MANIFEST, Manifest.of(parts).content(), None):
            raise already_there(self)
        if any(self.bucket.replace(MANIFEST, b"to be rejected", tag) for tag in (None, WRONG_TAG)):
            self.bucket.delete([MANIFEST])
            raise BankError(
                f"the store of '{self}' ignores conditions (If-Match), so two writers could lose "
                "each other's commits; use one that honours them"
            )

    def commit(self, add: Sequence[Entry], replacing: Collection[str] = ()) -> None:
        """Add published parts to the bank in one commit.

        Args:
            add: the parts; one that the bank has is not listed twice.
            replacing: names of documents to remove from the other parts; they need not exist.
        """
        meta, written = self.meta(), dict[str, Entry]()
        for entry in add:
            check_fingerprint(str(self), meta.fingerprint, entry.meta.fingerprint)

        def without(entry: Entry) -> Entry:
            if entry.name not in written:
                written[entry.name] = entry
                if found := self._held([entry], replacing):
                    with temporary(self.work) as path:
                        self._file(entry).copy_to(path)
                        BankFile(path).remove(*found)
                        written[entry.name] = self.publish(path)
            return written[entry.name]

        self._change(lambda parts: [*(without(one) for one in parts if one not in add), *add])

    def _change(self, change: Change, keep: timedelta | None = None) -> None:
        """Commit a change, unless it changes nothing; `keep` is that of `Manifest.of`."""
        until, pause = time.monotonic() + self.wait, 0.02
        while True:
            now, tag = self._newest()
            changed = change(now.parts)
            # A bank without documents keeps a part, which has its metadata.
            parts = [entry for entry in changed if entry.head.documents] or changed[:1]
            new = Manifest.of(parts, now, keep)
            if (new.parts, new.dropped) == (now.parts, now.dropped):
                return
            if len(content := new.content()) > LIMIT:
                raise BankError(f"bank '{self}' has too many parts; compact it")
            if self.bucket.replace(MANIFEST, content, tag):
                return
            if time.monotonic() > until:
                raise BankError(
                    f"bank '{self}' is being written by another process; wait until it is done"
                )
            time.sleep(random.uniform(0, pause))
            pause = min(2 * pause, 1.0)

    def _merge(self, run: Sequence[Entry]) -> None:
        """Replace neighbouring parts by one, unless another writer has changed them."""
        with temporary(self.work) as path:
            merged = BankFile(path)
            with merged.creating(run[0].meta):
                for entry in run:
                    _append_all(merged, self._file(entry))
            new = self.publish(path)

        def change(parts: Sequence[Entry]) -> Sequence[Entry]:
            at = parts.index(run[0]) if run[0] in parts else 0
            if [*parts[at : at + len(run)]] != [*run]:
                return parts
            return [*parts[:at], new, *parts[at + len(run) :]]

        self._change(change)

    def compact(self, keep: timedelta | None = None) -> Compacted:
        """Merge small neighbouring parts, and delete what nobody needs; answers do not change.

        Args:
            keep: how long files stay that the manifest does not list; None means a day. Less is
                safe only if no other process uses the bank.
        """
        keep, before = KEEP if keep is None else keep, self.size
        # Documents are not moved without their texts, which the index of words is made from.
        for run in _runs(self.manifest().parts) if self.meta().texts else ():
            self._merge(run)
        self._change(lambda parts: parts, keep)
        # Listed first: what is committed after that is in the manifest.
        oldest = datetime.now(UTC) - keep
        listed = [one for one in self.bucket.entries() if PART_NAME.fullmatch(one.name)]
        now = self.manifest()
        named = {entry.name for entry in now.parts} | {*now.dropped}
        self.bucket.delete(
            one.name for one in listed if one.name not in named and one.modified <= oldest
        )
        for path in self.work.rglob("*.bank*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime <= oldest.timestamp():
                    path.unlink()
        return Compacted(before, self.size)


def _runs(parts: Sequence[Entry]) -> list[list[Entry]]:
    """Return runs of at least two neighbouring parts that fit into one together."""
    runs: list[list[Entry]] = [[]]
    for entry in parts:
        if sum(one.bytes for one in runs[-1]) + entry.bytes > PART_BYTES:
            runs.append([])
        runs[-1].append(entry)
    return [run for run in runs if len(run) > 1]


def _append_all(target: BankFile, source: PartFile) -> None:
    """Append the documents of a part to the file of a bank, unchanged."""
    view = View.newest(source)
    columns = view.columns
    bounds = np.searchsorted(columns.blocks.documents, np.arange(len(columns.documents) + 1))
    for index, (start, end) in enumerate(pairwise(bounds.tolist())):
        room, blocks = view.empty(end - start), columns.blocks.take(slice(start, end))
        view.read(columns.ids[start:end].tolist(), room, range(end - start))
        blocks = blocks.of_documents(blocks.documents - index)
        target.append(view.meta.fingerprint, [view.documents[index]], blocks, room)
