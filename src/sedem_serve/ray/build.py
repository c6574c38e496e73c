"""Build a bank on many machines: tasks of Ray encode documents, this machine commits.

A task makes a bank of the documents that it is given. It sends that bank here, where it is
appended, or uploads it as a part, which this machine commits. Documents are grouped as on one
machine, and every task builds as one machine does, so the memory is the same. Groups are committed
in the order of the sources. To resume a killed build, repeat it: it skips what was committed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from sedem.bank.blocks import Meta
from sedem.bank.file import BankFile, Place, is_remote
from sedem.bank.memory_bank import Snapshot, View, append_to, copy_to, store_at
from sedem.bank.parts import Entry, Parts
from sedem.config import NO_BARS
from sedem.errors import BankError, ConfigError, SedemError, UnavailableError, first_line
from sedem.modules import SedemModules
from sedem.reading.building import Report, Taken, add_documents, begin, commits, finish
from sedem.types import Document
from sedem_serve.ray.cluster import connected
from sedem_serve.ray.sources import Sources

if TYPE_CHECKING:
    from sedem.model import SeDeM

AHEAD = 2
"""Groups of documents in flight for each worker, so that the next one is there when one is done."""
RETRIES = 3
"""How often Ray repeats a task whose process was lost."""
LOOK = 2.0
"""Seconds between two checks of the machines of the cluster."""
PATIENCE = 300.0
"""Seconds without any worker after which a build is given up."""

Progress = Callable[[int, int, float], None]
"""Called with the bytes done, the total bytes, and the tokens read per second so far."""


@dataclass(frozen=True)
class Workers:
    """The workers that encode.

    Attributes:
        address: address of the Ray cluster; see `connected`.
        checkpoint: folder or hub id of the model, which every host can open.
        most: maximum workers; None means one for each GPU, or for each `cpus` CPUs.
        cpus: CPUs of a worker.
    """

    address: str
    checkpoint: str
    most: int | None = None
    cpus: int = 1

    def room(self) -> tuple[int, bool]:
        """Return how many workers the cluster has room for, and whether they use its GPUs."""
        import ray

        hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = int(sum(host.get("GPU", 0) for host in hosts))
        return gpus or sum(int(host.get("CPU", 0) // self.cpus) for host in hosts), gpus > 0


def build_on_ray(
    model: SedemModules,
    workers: Workers,
    path: Place,
    sources: Sources,
    progress: Progress | None = None,
    *,
    source: str | None = None,
    dtype: str | None = None,
    keys: str | None = None,
    words: bool = True,
) -> Report:
    """Create or extend a bank with the workers of a Ray cluster.

    The bank is the same as `sedem.reading.building.build_bank` makes from the same documents.

    Args:
        model: the model on this machine; the workers open theirs, which must be the same.
        path: file of the bank, or its place if it is in parts, which every worker can write.
        source, dtype, keys, words: as in `build_bank`.

    Raises:
        ConfigError: there is no such cluster, it has no room, or a host lacks the model.
        UnavailableError: the cluster has lost all workers, or some documents kill every worker.
        SedemError: as in `build_bank`.
    """
    store = store_at(path)
    meta, stored = begin(model, store, source, dtype, keys, words)
    taken, exists = Taken(stored, lambda one: sources.sizes[one.name]), store.exists()
    if isinstance(store, BankFile):
        # The banks are appended, which indexes their words here.
        job = Job(workers, version("sedem"), replace(meta, words=False), None)
    else:
        # A worker has another working folder.
        place = path if is_remote(path) else Path(path).resolve()
        job = Job(workers, version("sedem"), meta, place)
    with connected(workers.address):
        started, tokens = time.monotonic(), 0
        for documents, done, made in _encoded_in_order(job, _groups(taken, sources)):
            if isinstance(store, BankFile):
                part = received(*made)
                append_to(store, part) if exists else copy_to(store, part, meta)
                tokens += part.tokens
            else:
                replaced = [one.name for one in documents if one.name in stored]
                store.commit([made], replaced) if exists else store.start([made])
                tokens += made.head.tokens
            exists = True
            if progress is not None:
                speed = tokens / (time.monotonic() - started)
                progress(done, max(sources.total, done), speed)
    return finish(model, store, keys, taken)


# On this machine


Group = tuple[list[Document], int]
"""Documents that one task reads, and the bytes of all documents up to their end."""


def _groups(taken: Taken, sources: Sources) -> Iterator[Group]:
    """Yield what the bank lacks, in the order of the sources."""
    changed = given = 0

    def counted() -> Iterator[Document]:
        nonlocal changed
        for document in taken.changed(sources):
            changed += sources.sizes[document.name]
            yield document

    for documents in commits(counted()):
        given += sum(sources.sizes[document.name] for document in documents)
        # Without a long document that was already taken but comes in the next group.
        yield documents, taken.total - (changed - given)


def _encoded_in_order(
    job: Job, groups: Iterator[Group]
) -> Iterator[tuple[list[Document], int, Any]]:
    """Yield each group with what `encode` made of it, in order; few are in memory at a time.

    If taking a group fails, those before it are yielded before the error is raised.
    """
    import ray

    workers = job.workers
    room, on_gpus = workers.room()
    if not room:
        raise ConfigError(
            f"no host of the cluster has a GPU or {workers.cpus} CPUs for a worker; give fewer "
            "with --worker-cpus, or start Ray there with more"
        )
    options: dict[str, Any] = {"num_cpus": workers.cpus}
    if on_gpus:
        # A process keeps its model, so Ray must neither end it nor hide the other GPUs from it.
        every = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
        options |= {"num_gpus": 1, "max_calls": 0, "runtime_env": every}
    task = ray.remote(max_retries=RETRIES, scheduling_strategy="SPREAD", **options)(encode)
    pending: deque[tuple[Group, Any]] = deque()
    failure: Exception | None = None
    taking = True
    while taking or pending:
        if taking and len(pending) < (workers.most or AHEAD * max(workers.room()[0], 1)):
            try:
                group = next(groups)
                pending.append((group, task.remote(job, group[0])))
            except StopIteration:
                taking = False
            except Exception as error:
                failure, taking = error, False
            continue
        # Wait for the oldest, while the cluster has workers or may get them back.
        ((documents, done), reference), seen = pending.popleft(), time.monotonic()
        try:
            while not ray.wait([reference], timeout=LOOK)[0]:
                seen = time.monotonic() if workers.room()[0] else seen
                if time.monotonic() - seen > PATIENCE:
                    raise UnavailableError(
                        f"the cluster has had no worker for {PATIENCE / 60:.0f} minutes; run the "
                        "same command again when its hosts are back to continue"
                    )
            made = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, SedemError) else error) from None
        except ray.exceptions.RayError as error:
            names = [f"'{document.name}'" for document in documents]
            named = ", ".join(names[:3])
            named += f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            raise UnavailableError(
                f"{RETRIES + 1} workers died while they read {named} ({first_line(error)}); give "
                "them more memory, or leave that out"
            ) from None
        yield documents, done, made
    if failure is not None:
        raise failure


def received(content: bytes, sha256: str) -> Snapshot:
    """Return the bank that a worker has sent, in RAM."""
    # In RAM, SQLite does not check pages.
    if hashlib.sha256(content).hexdigest() != sha256:
        raise BankError(
            "memory was damaged between a worker and this machine (its checksum differs); build "
            "again, and check the network and the memory of both"
        )
    file = BankFile.of_bytes(content)
    return Snapshot([View.newest(file)], file)


# On the workers


@dataclass(frozen=True)
class Job:
    """What all tasks of a build share.

    Attributes:
        version: version of sedem on the machine that commits.
        meta: metadata of the banks that tasks make.
        place: the bank that they become parts of; None sends them to the machine that commits.
    """

    workers: Workers
    version: str
    meta: Meta
    place: Place | None


def encode(job: Job, documents: Sequence[Document]) -> tuple[bytes, str] | Entry:
    """Read documents into a bank of their own.

    Returns:
        The file and its SHA-256, or its entry if it was uploaded as a part.
    """
    import ray

    gpus = ray.get_gpu_ids() if torch.cuda.is_available() else []
    torch.set_num_threads(job.workers.cpus)
    meta, device = job.meta, f"cuda:{gpus[0]}" if gpus else None
    name = job.workers.checkpoint
    model = _opened(name, job.version, meta.fingerprint, job.place, device)
    with TemporaryDirectory() as folder:
        made, sent = BankFile(Path(folder, "made.bank")), Path(folder, "sent.bank")
        add_documents(model, model.engine, made, meta, documents)
        if job.place is not None:
            return Parts(job.place).publish(made)
        # Without the log beside it, and without the connections that the build has left.
        made.copy_to(sent)
        content = sent.read_bytes()
        return content, hashlib.sha256(content).hexdigest()


@lru_cache(1)
def _opened(
    name: str, wanted_version: str, wanted: str, place: Place | None, device: str | None
) -> SeDeM:
    """Open the model once per process, and check that this host can be used."""
    from sedem.model import SeDeM

    host = f"host '{os.uname().nodename}' of the cluster"
    if (installed := version("sedem")) != wanted_version:
        raise ConfigError(
            f"{host} has sedem {installed}, this machine has {wanted_version}; install the same "
            "version on all"
        )
    os.environ.setdefault(NO_BARS, "1")
    try:
        model = SeDeM.from_pretrained(name, device=device)
    except (SedemError, OSError) as error:
        raise ConfigError(
            f"{host} cannot open '{name}' ({error}); put it where every host sees it under the "
            "same path, or give a hub id"
        ) from None
    if (found := model.fingerprint()) != wanted:
        raise ConfigError(
            f"{host} has another model at '{name}' ({found[:12]}) than this machine "
            f"({wanted[:12]}); give all hosts the same one"
        )
    # A bank in an object store appears with its first commit.
    if place is not None and not is_remote(place) and not Parts(place).exists():
        raise ConfigError(
            f"{host} cannot use bank '{place}' (it does not exist there); put it where every "
            "host sees it under the same path"
        )
    return model
