"""`sedem serve` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from serving import bearer

pytestmark = pytest.mark.slow


def serve(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "SEDEM_API_KEY"}
    return subprocess.Popen(
        [sys.executable, "-c", "from sedem.cli.main import app; app()", "serve", "--folder",
         str(folder), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_and_ends_with_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    process = serve(tmp_path / "server", "--port", "0")
    try:
        assert process.stdout is not None
        page = re.fullmatch(r"the page: (http://127\.0\.0\.1:\d+/)\?key=(\S+)\n",
                            process.stdout.readline())  # fmt: skip
        assert page is not None
        address, secret = page.groups()
        assert httpx.get(f"{address}health").is_success
        assert httpx.get(f"{address}v1/models").status_code == 401
        deadline = time.monotonic() + 180
        while not httpx.get(f"{address}ready", headers=bearer(secret)).is_success:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        _, err = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert secret not in err


def test_the_command_says_in_one_line_why_it_cannot_serve(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        _, err = serve(tmp_path / "a", "--port", port).communicate(timeout=180)
    assert re.fullmatch(rf"error: port {port} of 127\.0\.0\.1 is in use.*\n", err)
    process = serve(tmp_path / "b", "--port", "0", "--model", str(tmp_path / "none"))
    _, err = process.communicate(timeout=180)
    assert process.returncode == 1
    assert re.search(r"^error: .*none", err.splitlines()[-1])
    assert "Traceback" not in err
