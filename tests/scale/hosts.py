"""Several hosts on one machine: each is a Linux network namespace in which a Ray node runs.

The namespaces are joined by a bridge, so the nodes talk through TCP as machines do, each under an
address of its own, and one of them can be lost like a machine whose plug is pulled:

    with hosts(2) as cluster:
        cluster.connect()            # this process is a driver on the head node, which has no CPU
        ...
        cluster.hosts[0].kill()      # its link goes down and all its processes are killed
        cluster.start()              # another host joins

All hosts see the same files. Needs Linux, root and the command `ip`; `not_permitted` says what is
missing, for `pytest.skip`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

SECONDS = 90
"""After which a node that has not joined has failed; several start slowly on few cores."""
ATTEMPTS = 4
"""At starting a node: Ray gives up after 30 seconds, which busy cores may take."""
OBJECTS = 150_000_000
"""Bytes of a host's object store."""
RAY = Path(sys.executable).with_name("ray")
SOURCES = Path(__file__).parents[2] / "src"
ENVIRONMENT = {
    # The network has nobody else in it. Ray would look for a token in the home folder.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A host that is lost is noticed after some 15 seconds, not 50.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
    # Workers would wait for everything else on a busy machine.
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join([str(SOURCES), str(Path(__file__).parents[1])]),
}
"""What the nodes of every cluster are started with."""

_numbers = itertools.count()


def not_permitted() -> str | None:
    """Why hosts cannot be started here, in a sentence; None if they can."""
    if not sys.platform.startswith("linux"):
        return "hosts are network namespaces, which only Linux has"
    if shutil.which("ip") is None:
        return "hosts need the command 'ip'; install iproute2"
    if not RAY.exists():
        return "hosts need Ray; install sedem[scale]"
    name = _name()
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
        _ip("link", "add", name, "type", "bridge")
        _ip("link", "del", name)
    except subprocess.CalledProcessError as error:
        return (
            f"hosts need the right to make network namespaces and bridges: {error.stderr.strip()}"
        )
    return None


@dataclass
class Host:
    """One host.

    Attributes:
        name: of its network namespace.
        link: name of its end of the network, outside of the namespace.
        node: the process of `ray start`.
    """

    name: str
    link: str
    address: str
    node: subprocess.Popen[bytes]
    alive: bool = True

    def processes(self) -> list[int]:
        """Return the ids of all processes of the host."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """Lose the host as by a power cut: nobody is told, and nothing is closed."""
        _ip("link", "set", self.link, "down")
        self.remove()

    def remove(self) -> None:
        """Kill all processes of the host and remove its network."""
        if not self.alive:
            return
        self.alive = False
        _end(self.node, self.processes)
        _ip("netns", "del", self.name)


@dataclass
class Cluster:
    """A Ray cluster: a head node on this machine without a CPU, and hosts.

    Attributes:
        address: of the head node, "IP:PORT".
        folder: of Ray's sessions and the logs of the nodes.
        cpus: of each host.
        hosts: all that have joined, in their order.
        started: how many were started.
    """

    address: str
    name: str
    folder: Path
    cpus: int
    hosts: list[Host] = field(default_factory=list)
    started: int = 0

    @property
    def head(self) -> str:
        """The IP address of the head node, and of every driver in this process's namespace."""
        return self.address.rpartition(":")[0]

    def connect(self) -> None:
        """Connect this process to the cluster."""
        import ray

        ray.init(
            address=self.address,
            _node_ip_address=self.head,
            log_to_driver=False,
            logging_level="ERROR",
        )

    def start(self, count: int = 1) -> list[Host]:
        """Start hosts and wait until their nodes have joined the cluster.

        Raises:
            TimeoutError: one has not joined; the message ends with its log.
        """
        started = [self._start() for _ in range(count)]
        for attempt in range(1, ATTEMPTS + 1):
            for index, host in enumerate(started):
                try:
                    _wait_until_started(host.node, self.folder / f"{host.name}.log")
                except TimeoutError:
                    self.hosts.remove(host)
                    host.remove()
                    if attempt == ATTEMPTS:
                        raise
                    started[index] = self._start()
        return started

    def _start(self) -> Host:
        self.started += 1
        number = self.started
        name, link = f"{self.name}-{number}", f"{self.name}v{number}"
        address = f"{self.head.rpartition('.')[0]}.{number + 1}"
        _ip("netns", "add", name)
        with ExitStack() as undo:
            undo.callback(_ip, "netns", "del", name)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", link, "master", self.name, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            node = _ray(
                [*("ip", "netns", "exec", name)],
                [f"--address={self.address}", f"--num-cpus={self.cpus}"],
                address,
                self.folder / f"{name}.log",
            )
            undo.pop_all()
        host = Host(name, link, address, node)
        self.hosts.append(host)
        return host


@contextmanager
def hosts(count: int, cpus: int = 1) -> Iterator[Cluster]:
    """Start a Ray cluster of hosts; all of it is gone when the block ends, in whatever way.

    Args:
        count: hosts beside the head node.
        cpus: of each host, as Ray counts them.

    Yields:
        The cluster, to which this process is not connected yet.
    """
    import ray

    name = _name()
    subnet = _free_subnet()
    # Not below the user's folder for such: paths of sockets have at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="sd", dir="/tmp"))
    head = f"{subnet}.1"
    cluster = Cluster(f"{head}:{_free_port()}", name, folder, cpus)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        _ip("link", "add", name, "type", "bridge")
        stack.callback(_ip, "link", "del", name)
        _ip("addr", "add", f"{head}/24", "dev", name)
        _ip("link", "set", name, "up")
        node = _head_node(cluster)
        stack.callback(_end, node, partial(_descendants, node.pid))
        stack.callback(lambda: [host.remove() for host in cluster.hosts])
        cluster.start(count)
        stack.callback(ray.shutdown)
        yield cluster


def _head_node(cluster: Cluster) -> subprocess.Popen[bytes]:
    """Start the head node; it is tried again when it takes too long."""
    log = cluster.folder / "head.log"
    for attempt in range(1, ATTEMPTS + 1):
        options = [
            *("--head", "--num-cpus=0", "--include-dashboard=false"),
            f"--port={cluster.address.rpartition(':')[2]}",
            f"--temp-dir={cluster.folder}",
            f"--ray-client-server-port={_free_port()}",
        ]
        node = _ray([], options, cluster.head, log)
        try:
            _wait_until_started(node, log)
            break
        except BaseException as error:
            _end(node, partial(_descendants, node.pid))
            if attempt == ATTEMPTS or not isinstance(error, TimeoutError):
                raise
    return node


def _ray(prefix: list[str], options: list[str], address: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a node of Ray, which ends with this command."""
    common = [
        *("--block", "--disable-usage-stats", f"--node-ip-address={address}"),
        f"--object-store-memory={OBJECTS}",
    ]
    with log.open("wb") as file:
        return subprocess.Popen(
            [*prefix, str(RAY), "start", *options, *common],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def _wait_until_started(node: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + SECONDS
    while "Ray runtime started" not in (told := log.read_text(errors="replace")):
        if node.poll() is not None or time.monotonic() > until:
            raise TimeoutError(f"a node of Ray has not started:\n{told[-2000:]}")
        time.sleep(0.1)


def _end(node: subprocess.Popen[bytes], processes: Any) -> None:
    """Kill processes until none is left: those that are killed may just have started others."""
    until = time.monotonic() + SECONDS
    while (left := processes()) and time.monotonic() < until:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    node.kill()
    node.wait()


def _descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those of these, the oldest first."""
    try:
        found = psutil.Process(pid).children(recursive=True)
        return [p.pid for p in found if p.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def _free_subnet() -> str:
    """The first three numbers of a private network that this machine does not use."""
    used = {
        entry["local"].rpartition(".")[0]
        for interface in json.loads(_ip("-j", "addr"))
        for entry in interface["addr_info"]
    }
    while True:
        subnet = f"10.{random.randrange(180, 250)}.{random.randrange(256)}"
        if subnet not in used:
            return subnet


def _free_port() -> int:
    """A port that nobody uses; Ray listens on it at every address, not only at the node's."""
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _name() -> str:
    """A name that no other process gives; an interface's has at most 15 characters."""
    return f"sd{os.getpid():x}-{next(_numbers)}"


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout
