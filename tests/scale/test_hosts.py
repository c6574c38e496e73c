"""Hosts as network namespaces; starting them takes a minute."""

from __future__ import annotations

import subprocess
import time

import pytest
from scale.hosts import SECONDS, Cluster, hosts, not_permitted

pytestmark = pytest.mark.slow


def living(cluster: Cluster) -> set[str]:
    import ray

    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def test_hosts_join_and_are_lost() -> None:
    import ray

    if reason := not_permitted():
        pytest.skip(reason)
    with hosts(2) as cluster:
        cluster.connect()

        @ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
        def where() -> str:
            time.sleep(1)
            return ray.util.get_node_ip_address()

        addresses = {host.address for host in cluster.hosts}
        assert living(cluster) == {cluster.head, *addresses}
        assert set(ray.get([where.remote() for _ in range(4)])) == addresses
        lost, other = cluster.hosts
        lost.kill()
        until = time.monotonic() + SECONDS
        while living(cluster) != {cluster.head, other.address} and time.monotonic() < until:
            time.sleep(0.2)
        assert set(ray.get([where.remote() for _ in range(2)])) == {other.address}
        [new] = cluster.start()
        assert living(cluster) == {cluster.head, other.address, new.address}


def test_nothing_is_left_after_an_error() -> None:
    if reason := not_permitted():
        pytest.skip(reason)
    with pytest.raises(ZeroDivisionError), hosts(1) as cluster:
        assert cluster.hosts[0].processes()
        _ = 1 / 0
    for command in (["ip", "netns", "list"], ["ip", "link"], ["ps", "-eo", "args"]):
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert cluster.name not in told and cluster.folder.name not in told
    assert not cluster.folder.exists()
