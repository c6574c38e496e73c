"""The campaigns of many machines; a new one is a line here."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from campaign import Cases, Report, Result
from scale.building import (
    build_alone,
    build_and_lose,
    differences,
    write_checkpoint,
    write_documents,
)
from scale.hosts import ATTEMPTS, ENVIRONMENT, OBJECTS, hosts, not_permitted
from scale.serving import Counts, Machines, compare, kill_replica, killed_host, served, under_load

from sedem import SeDeM
from sedem.bank.file import BankFile
from sedem.bank.parts import Parts
from sedem.reading import building
from sedem_serve.ray.build import Workers, build_on_ray
from sedem_serve.ray.sources import Sources

COMMIT = 10_000
"""Characters of a piece in builds with losses, so that small ones have many."""
DRIVER = f"""
import os, signal, sys
from pathlib import Path
from sedem import SeDeM
from sedem.reading import building
from sedem_serve.ray.build import Workers, build_on_ray
from sedem_serve.ray.sources import Sources
address, checkpoint, bank, folder, commits = sys.argv[1:]
building.COMMIT = {COMMIT}
seen = []
def progress(*_):
    seen.append(1)
    if len(seen) == int(commits):
        os.kill(os.getpid(), signal.SIGKILL)
model = SeDeM.from_pretrained(checkpoint)
workers = Workers(address, checkpoint)
build_on_ray(model, workers, Path(bank), Sources([folder]), progress, source="tiny")
"""
"""Builds, and kills itself after a number of commits; 0 commits kill nothing."""


@contextmanager
def local_cluster(cpus: int) -> Iterator[str]:
    """A cluster of one node, to which this process is connected; yields its address."""
    import ray

    settings = {name: value for name, value in ENVIRONMENT.items() if name.startswith("RAY_")}
    with (
        tempfile.TemporaryDirectory(prefix="sd", dir="/tmp") as folder,
        patch.dict(os.environ, settings),
    ):
        # Ray gives up after 30 seconds, which busy cores may take.
        for attempt in range(1, ATTEMPTS + 1):
            try:
                ray.init(
                    num_cpus=cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    object_store_memory=OBJECTS,
                    _temp_dir=folder,
                )
                break
            except Exception:
                ray.shutdown()
                if attempt == ATTEMPTS:
                    raise
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            ray.shutdown()


@dataclass
class Texts:
    """Documents, the model that reads them, and the bank that one machine builds of them."""

    folder: Path
    checkpoint: str
    pieces: int = 0

    @classmethod
    def written(cls, folder: Path, count: int) -> Texts:
        """Write the documents and a tiny model, and build the bank alone."""
        checkpoint = write_checkpoint(folder)
        documents = write_documents(folder / "texts", count)
        with patch.object(building, "COMMIT", COMMIT):
            build_alone(checkpoint, documents, folder / "alone.bank")
        return cls(folder, checkpoint, BankFile(folder / "alone.bank").head().version)

    def differing(self, bank: Path) -> list[str]:
        """What differs from the bank of one machine."""
        return differences(bank, self.folder / "alone.bank")


def throughput(points: int, folder: Path, seed: int) -> Result:
    """Tokens a second that one and two workers read with sedem-nano."""
    result = Result("builds")
    write_documents(folder / "texts", points)
    model = SeDeM.from_pretrained("sedem-nano")
    speeds = []
    with local_cluster(2) as address:
        for most in (1, 2):
            with result.case(f"{most} workers", f"a build with {most} workers"):
                bank, seen = folder / f"{most}.bank", []
                build_on_ray(
                    model,
                    Workers(address, "sedem-nano", most),
                    bank,
                    Sources([str(folder / "texts")]),
                    lambda *told, seen=seen: seen.append(told),
                )
                speeds.append(seen[-1][2])
                result.figures[f"{most} workers"] = f"{speeds[-1]:,.0f} tokens a second"
    with result.case("comparison", "the banks of one and of two workers"):
        result.wrong += differences(folder / "2.bank", folder / "1.bank")
        result.figures["two over one"] = f"{speeds[1] / speeds[0]:.2f}"
    return result


def workers_killed(points: int, folder: Path, seed: int) -> Result:
    """SIGKILL to every worker after a random commit, of banks in one file and in parts."""
    result, chooser = Result("kills"), random.Random(seed)
    texts = Texts.written(folder, 60)
    model = SeDeM.from_pretrained(texts.checkpoint)
    with local_cluster(2) as address, patch.object(building, "COMMIT", COMMIT):
        for number in range(points):
            # Near the end, no worker has anything to do.
            after, commits, killed = chooser.randrange(1, texts.pieces // 2), [], []

            def kill(
                *_: Any, after: int = after, commits: Any = commits, killed: Any = killed
            ) -> None:
                commits.append(1)
                if len(commits) == after:
                    for process in psutil.Process().children(recursive=True):
                        if "encode" in process.name():
                            killed.append(process.pid)
                            process.kill()

            with result.case("workers", f"workers killed after {after} commits"):
                bank = folder / f"{number}.bank"
                if number % 2:
                    with Parts(bank).creating(building.new_meta(model, "tiny")):
                        pass
                workers = Workers(address, texts.checkpoint)
                sources = Sources([str(folder / "texts")])
                build_on_ray(model, workers, bank, sources, kill, source="tiny")
                result.require(bool(killed), f"no worker was there after {after} commits")
                result.count("workers killed", len(killed))
                result.wrong += texts.differing(bank)
    return result


def drivers_killed(points: int, folder: Path, seed: int) -> Result:
    """SIGKILL to the command that commits, which is then started again."""
    result, chooser = Result("kills"), random.Random(seed)
    texts = Texts.written(folder, 60)
    with local_cluster(2) as address:
        for number in range(points):
            after, bank = chooser.randrange(1, texts.pieces), folder / f"{number}.bank"

            def drive(commits: int, bank: Path = bank) -> int:
                words = [address, texts.checkpoint, str(bank), str(folder / "texts"), str(commits)]
                command = [sys.executable, "-c", DRIVER, *words]
                return subprocess.run(command, timeout=600, env=os.environ | ENVIRONMENT).returncode

            with result.case("driver", f"the driver killed after {after} commits"):
                result.require(drive(after) == -signal.SIGKILL, "the driver was not killed")
                committed = BankFile(bank).head().version
                result.require(committed == after, f"{committed} pieces after {after} commits")
                result.require(drive(0) == 0, "the second driver failed")
                result.wrong += texts.differing(bank)
    return result


def hosts_lost_building(points: int, folder: Path, seed: int) -> Result:
    """A host, as a network namespace, loses its link and all its processes."""
    result, chooser = Result("hosts"), random.Random(seed)
    if reason := not_permitted():
        result.figures["not run"] = reason
        return result
    texts = Texts.written(folder, 60)
    with hosts(2) as cluster, patch.object(building, "COMMIT", COMMIT):
        cluster.connect()
        for number in range(points):
            after, bank = chooser.randrange(1, texts.pieces // 2), folder / f"{number}.bank"
            with result.case("host", f"a host lost after {after} commits"):
                if number:
                    cluster.start()
                busy = build_and_lose(cluster, texts.checkpoint, folder / "texts", bank, after)
                result.require(bool(busy), "the lost host had no process")
                result.wrong += texts.differing(bank)
    return result


def partitions(points: int, folder: Path, seed: int) -> Result:
    """The same questions to 1, 2 and 4 partitions, each compared with one machine."""
    result = Result("answers")
    for parts in (1, 2, 4):
        place = folder / str(parts)
        place.mkdir()
        with local_cluster(parts + 3), served(place, Machines(partitions=parts)) as server:
            _told(result, f"{parts} partitions", compare(server, points))
    return result


def _told(result: Result, kind: str, counts: Counts) -> None:
    """Count what came of questions; another answer is wrong."""
    result.cases[kind] += counts.asked
    for name in ("same", "refused", "broken"):
        result.count(f"{kind}: {name}", getattr(counts, name))
    result.require(counts.wrong == 0, f"{kind}: {counts.wrong} answers differ")


def replicas_killed(points: int, folder: Path, seed: int) -> Result:
    """SIGKILL to an engine and to a selector while answers are streamed."""
    result = Result("answers")
    machines = Machines(partitions=2, engines=2, copies=2)
    for name in ("engine", "selector-0"):
        place = folder / name
        place.mkdir()
        with local_cluster(7), served(place, machines) as server:
            kill = partial(kill_replica, name)
            _told(result, f"{name} killed", under_load(server, points, kill))
    return result


def hosts_lost_serving(points: int, folder: Path, seed: int) -> Result:
    """A host with an engine and selectors is lost while answers are streamed."""
    result = Result("answers")
    if reason := not_permitted():
        result.figures["not run"] = reason
        return result
    _told(result, "host lost", killed_host(points))
    return result


CAMPAIGNS: Mapping[str, Cases] = {
    "building": Cases(
        throughput,
        60,
        "Documents read with sedem-nano by one and by two workers of a Ray cluster; the banks are "
        "the same to the bit",
    ),
    "workers killed": Cases(
        workers_killed,
        3,
        "SIGKILL to all workers after a random commit; every other bank is in parts: the bank is "
        "that of one machine, to the bit",
    ),
    "drivers killed": Cases(
        drivers_killed,
        3,
        "SIGKILL to the command after a random commit; it is given again: the same",
    ),
    "hosts lost while building": Cases(
        hosts_lost_building,
        2,
        "A host (a network namespace) loses its link and its processes after a random commit: the "
        "same",
    ),
    "partitions": Cases(
        partitions,
        100,
        "Each question to 1, 2 and 4 partitions: text, citations, scores and confidence are those "
        "of one machine, to the bit",
    ),
    "replicas killed": Cases(
        replicas_killed,
        24,
        "SIGKILL to an engine or a selector while answers are streamed: no answer is another one; "
        "a stream that had begun may end with an error",
    ),
    "hosts lost while serving": Cases(
        hosts_lost_serving, 24, "A host with an engine and selectors is lost: the same"
    ),
}
REPORT = Report(
    Path(__file__).with_name("report.json"),
    Path(__file__).parents[2] / "experiments" / "scale.md",
    "campaign",
    CAMPAIGNS,
    ("torch", "ray", "transformers"),
    long=5,
)
