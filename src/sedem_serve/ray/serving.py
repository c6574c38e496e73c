"""`sedem serve --ray`: the server as a Ray Serve application on a cluster.

One replica is the HTTP application, on the node where the command was run, because the server's
folder is there. Each part of the banks' keys is a deployment of selectors; all engines are another.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sedem.checkpoint import folder as checkpoint
from sedem.errors import ConfigError, first_line
from sedem_serve.ray.cluster import connected
from sedem_serve.server import logs
from sedem_serve.server.keys import KeyRing, keys_of, reload_keys
from sedem_serve.server.run import Announce, address_of, listen
from sedem_serve.server.settings import ServerSettings

APPLICATION = "sedem"
ONGOING = 10_000
"""Requests that the HTTP application serves at once; it refuses more questions by itself."""
SEARCHES = 256
"""Questions that may be queued at one selector; they are scored one at a time."""
LISTENING_SECONDS = 10.0
STARTING_SECONDS = 1800.0
"""Time limit for opening the model, the banks and their keys."""


@dataclass(frozen=True)
class Machines:
    """How a server is spread over a cluster.

    Attributes:
        partitions: parts of each bank's blocks.
        engines: replicas that answer.
        copies: replicas of each part.
    """

    partitions: int = 1
    engines: int = 1
    copies: int = 1

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if number < 1:
                raise ConfigError(f"{name} is {number}; it must be at least 1")


def run(settings: ServerSettings, machines: Machines, address: str, announce: Announce) -> None:
    """Serve until SIGTERM or Ctrl-C, which let running answers finish; SIGHUP reloads the keys.

    Args:
        address: address of the Ray cluster; see `cluster.connected`.
        announce: called with the address of the page once questions can be answered.

    Raises:
        ConfigError: there is no such cluster, or it has too little room.
        SedemError: the model or a bank cannot be opened.
    """
    checkpoint.locate(settings.model, None)
    keys, secret = keys_of(settings.key_file)
    logs.configure(settings.log_format, log_text=settings.log_text)
    # Checked before anything starts, for a clear error if it is in use; a proxy binds it later.
    listening = listen(settings.host, settings.port)
    port, page = listening.getsockname()[1], address_of(listening)
    listening.close()
    settings, ended = settings.with_changes(port=port), threading.Event()
    with connected(address), serving(settings, machines, keys) as ingress:

        def reload(*_: object) -> None:
            assert settings.key_file is not None
            reload_keys(settings.key_file, lambda ring: ingress.change_keys.remote(ring).result())

        handlers: dict[int, Callable[..., None]] = dict.fromkeys(
            (signal.SIGTERM, signal.SIGINT), lambda *_: ended.set()
        )
        if settings.key_file is not None:
            handlers[signal.SIGHUP] = reload
        announce(page, secret)
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            # With a timeout, because an endless wait would not let a handler run.
            while not ended.wait(0.5):
                pass
            logs.log("draining")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def serving(settings: ServerSettings, machines: Machines, keys: KeyRing) -> Iterator[Any]:
    """Run the application on the cluster that this process is connected to, until the block ends.

    Yields:
        The handle of the HTTP application, once questions can be answered.
    """
    import ray
    from ray import serve

    from sedem_serve.ray.replicas import EngineReplica, Ingress, SelectorReplica

    # Ray would wait for CPUs without end. GPUs are one each if there are enough, engines first.
    has, selectors = ray.cluster_resources(), machines.partitions * machines.copies
    cpus = selectors + machines.engines
    if cpus > has.get("CPU", 0):
        raise ConfigError(
            f"{machines.partitions} partitions of {machines.copies} copies and {machines.engines} "
            f"engines need {cpus} CPUs, the cluster has {has.get('CPU', 0):g}; add nodes, or give "
            "fewer"
        )
    free = has.get("GPU", 0)
    to_engine = {"num_cpus": 1, "num_gpus": float(free >= machines.engines)}
    to_selector = {"num_cpus": 1, "num_gpus": float(free >= machines.engines + selectors)}

    def deployment(kind: Any, name: str, replicas: int, ongoing: int, actor: Any) -> Any:
        return serve.deployment(
            kind,
            name=name,
            num_replicas=replicas,
            max_ongoing_requests=ongoing,
            ray_actor_options=dict(actor),
            graceful_shutdown_timeout_s=settings.drain_seconds,
        )

    serve.start(
        proxy_location="EveryNode",
        http_options={"host": settings.host, "port": settings.port},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    try:
        try:
            if ray.util.client.ray.is_connected():
                raise ConfigError(
                    "the server's folder must be on a node of the cluster; start the server there, "
                    "and give HOST:PORT instead of ray://"
                )
            # The deployments, each bound to those that it calls
            parts = [
                deployment(
                    SelectorReplica, f"selector-{part}", machines.copies, SEARCHES, to_selector
                ).bind(settings, part, machines.partitions)
                for part in range(machines.partitions)
            ]
            # More than its rows and its queue hold; a full queue refuses by itself.
            most = 2 * (settings.waiting + (settings.rows or 64))
            engine = deployment(EngineReplica, "engine", machines.engines, most, to_engine)
            engines = engine.bind(settings, *parts)
            here = {"num_cpus": 0, "resources": {f"node:{ray.util.get_node_ip_address()}": 0.001}}
            http = deployment(serve.ingress()(Ingress), "http", 1, ONGOING, here)
            own = settings.with_changes(device="cpu") if settings.device is None else settings
            ingress = serve.run(
                http.bind(own, keys, machines.engines, engines, *parts),
                name=APPLICATION,
                route_prefix="/",
            )
        except Exception as error:
            raise ConfigError(
                f"the server did not start on the cluster ({first_line(error)}); the logs of Ray "
                "Serve on its nodes have the reason"
            ) from error
        failed = ingress.opened.remote().result(timeout_s=STARTING_SECONDS)
        if failed is not None:
            raise failed
        # Ray Serve keeps the address of its first start.
        try:
            host = "127.0.0.1" if settings.host == "0.0.0.0" else settings.host
            socket.create_connection((host, settings.port), LISTENING_SECONDS).close()
        except OSError:
            raise ConfigError(
                f"Ray Serve already runs on the cluster, but not at "
                f"{settings.host}:{settings.port}; give its --host and --port, or end it with "
                "'serve shutdown'"
            ) from None
        yield ingress
    finally:
        serve.delete(APPLICATION)
        if not serve.status().applications:
            serve.shutdown()
