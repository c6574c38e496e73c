"""The server under load: `sedem serve` as a process of its own, with a bank of bundled texts."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from sedem import Document, SeDeM
from sedem.demo import DOCUMENTS

BANK, MODEL = "demo", "sedem-nano"
TEXTS = tuple(sorted(DOCUMENTS.glob("*.txt")))
SECONDS = 120.0
"""How long the server may take to be ready."""
SIGNALS: Mapping[str, signal.Signals] = {"step": signal.SIGUSR1, "prefill": signal.SIGUSR2}
"""What makes the next step or prefill of `load.failures` fail."""


@dataclass(frozen=True)
class Target:
    """A server that runs.

    Attributes:
        fail: makes its engine fail, in the next "step" or "prefill".
        end: ends it and returns the seconds until its port was free; None for a server in this
            process.
    """

    url: str
    secret: str
    model: str
    process: psutil.Process
    fail: Callable[[str], None]
    end: Callable[[], float] | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secret}"}

    def get(self, path: str, *, with_key: bool = True) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers if with_key else None, timeout=30)

    def metrics(self) -> dict[str, float]:
        """The figures of the server that have no labels."""
        lines = self.get("/metrics").raise_for_status().text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs if "{" not in name}

    def busy(self) -> int:
        """Questions that wait, answers that run and texts that are being read."""
        metrics = self.metrics()
        names = ("questions_waiting", "answers_running", "online_waiting")
        return round(sum(metrics[f"sedem_{name}"] for name in names))

    def memory(self) -> int:
        """Resident bytes of the process."""
        return int(self.process.memory_info().rss)

    def rows(self) -> int:
        """The most answers at once."""
        return round(self.metrics()["sedem_rows"])


def build_bank(folder: Path, texts: Sequence[Path] = TEXTS, copies: int = 1) -> Path:
    """Read bundled texts into a bank, each as so many documents."""
    path = folder / f"{BANK}.bank"
    if not path.exists():
        documents = [
            Document(f"{number}-{text.name}" if number else text.name, text.read_text("utf-8"))
            for number in range(copies)
            for text in texts
        ]
        SeDeM.from_pretrained(MODEL).read(documents).save(path)
    return path


@contextmanager
def serving(
    folder: Path, *flags: str, texts: Sequence[Path] = TEXTS, copies: int = 1, failing: bool = False
) -> Iterator[Target]:
    """Run `sedem serve` until the block ends.

    Args:
        folder: where bank, log and the server's own folder lie.
        copies: how often each text is in the bank.
        failing: whether its engine can be made to fail.

    Raises:
        RuntimeError: it did not start, or did not end as it should.
    """
    bank, secret = build_bank(folder, texts, copies), secrets.token_urlsafe(32)
    command = [
        sys.executable, "-m", "load.failures", "serve", "-m", MODEL, "--bank", f"{BANK}={bank}",
        "--folder", str(folder / "server"), "--port", "0", *flags,
    ]  # fmt: skip
    if not failing:
        command[1:3] = ["-c", "from sedem.cli.main import app; app()"]
    environment = {**os.environ, "SEDEM_API_KEY": secret, "PYTHONUNBUFFERED": "1"}
    environment.pop("OMP_NUM_THREADS", None)
    output, log = folder / "output", folder / "log"
    with output.open("wb") as standard, log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=standard, stderr=errors, env=environment)

    def wait(found: Callable[[], str | None], missing: str) -> str:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and process.poll() is None:
            if (what := found()) is not None:
                return what
            time.sleep(0.05)
        raise RuntimeError(f"the server {missing}: {_tail(log)}")

    def address() -> str | None:
        lines = output.read_text("utf-8").splitlines()
        pages = (line.split()[-1] for line in lines if line.startswith("the page:"))
        return next(pages, None)

    try:
        url = wait(address, "did not listen").rstrip("/")

        def fail(what: str) -> None:
            process.send_signal(SIGNALS[what])

        ended = list[float]()

        def end() -> float:
            began = time.monotonic()
            process.terminate()
            process.wait(SECONDS)
            with socket.create_server(("127.0.0.1", httpx.URL(url).port or 0)):
                ended.append(time.monotonic() - began)
            return ended[0]

        target = Target(url, secret, MODEL, psutil.Process(process.pid), fail, end)
        wait(lambda: "" if target.get("/ready").is_success else None, "was not ready")
        yield target
        if process.poll() is not None and not ended:
            raise RuntimeError(f"the server ended by itself: {_tail(log)}")
    finally:
        process.terminate()
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RuntimeError(f"the server did not end when told to: {_tail(log)}") from None
    if process.returncode:
        raise RuntimeError(f"the server ended with {process.returncode}: {_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text("utf-8", "replace")[-2000:]
