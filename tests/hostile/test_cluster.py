"""A cluster on this machine listens on loopback only, and needs a token; so does a user's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path

import pytest

from sedem.errors import ConfigError
from sedem_serve.ray.cluster import connected

CLUSTER = """
import json, os, subprocess, sys
from hostile.sockets import listening
from sedem_serve.ray.cluster import connected

with connected("local"):
    import ray
    one = ray.remote(lambda: 1).options(num_cpus=1)
    assert ray.get([one.remote() for _ in range(2)]) == [1, 1]
    stranger = f"import ray; ray.init(address={ray.get_runtime_context().gcs_address!r})"
    environment = {name: text for name, text in os.environ.items() if "RAY_AUTH" not in name}
    environment["HOME"] = sys.argv[1]
    told = subprocess.run(
        [sys.executable, "-c", stranger], env=environment, capture_output=True, text=True
    )
    print(json.dumps([listening(os.getpid()), told.returncode, told.stderr]))
assert "RAY_AUTH_TOKEN" not in os.environ
"""


@pytest.mark.slow
def test_a_local_cluster_is_for_this_run_only(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    run = subprocess.run(
        [sys.executable, "-c", CLUSTER, str(tmp_path)],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    sockets, status, said = json.loads(run.stdout.splitlines()[-1])
    # The server of its state, the raylet and the workers.
    assert len(sockets) > 4
    assert all(ip_address(address).is_loopback for address, _ in sockets), sockets
    assert 8265 not in [port for _, port in sockets]  # the dashboard
    assert status != 0 and "oken" in said


def test_a_cluster_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError, match=r"^a Ray cluster runs the code of anyone .* 'auto'.*"):
        connected("auto").__enter__()
