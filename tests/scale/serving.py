"""A server on a Ray cluster against one machine: questions while replicas and hosts are lost.

with served(folder, Machines(partitions=2)) as server:
    counts = compare(server, questions=500)
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from scale.hosts import hosts
from serving import KEYS, SECRET, bearer
from synthetic import WORDS, synthetic_bank

from sedem import MemoryBank, SeDeM
from sedem.answering.decoding import Decoding
from sedem.types import Answer
from sedem_serve.ray.serving import Machines, serving
from sedem_serve.server.run import listen
from sedem_serve.server.settings import ServerSettings

MODEL = "sedem-nano"
BANK = "register"
TOKENS = 8
"""Of an answer."""
SECONDS = 300.0
REPLICA = "ray::ServeReplica:sedem:"
"""What the command line of a replica begins with; the name of its deployment follows."""


@dataclass
class Counts:
    """What came of questions.

    Attributes:
        asked: how many there were.
        same: how many were answered as one machine answers.
        refused: how many got an error instead of an answer, before any text.
        broken: how many streams ended with an error event after some text.
        wrong: how many got another answer, or the beginning of another one.
    """

    asked: int = 0
    same: int = 0
    refused: int = 0
    broken: int = 0
    wrong: int = 0


@dataclass
class Server:
    """A server that runs on the cluster of this process; `place` is that of its bank."""

    client: httpx.Client
    model: SeDeM
    place: Path

    def ask(self, question: str, **fields: Any) -> dict[str, Any]:
        """Ask; returns the whole body."""
        body = body_of(question, **fields)
        response = self.client.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found

    def expected(self, question: str, k: int | str = 2) -> Answer:
        """What one machine answers now."""
        bank = MemoryBank.open(self.place)
        return self.model.answer(bank, question, k=k, decoding=Decoding(TOKENS))


@contextmanager
def served(folder: Path, machines: Machines) -> Iterator[Server]:
    """Serve a synthetic bank on the cluster that this process is connected to.

    Args:
        folder: an empty one that every node sees.
        machines: how the server is spread.
    """
    model = SeDeM.from_pretrained(MODEL, device="cpu")
    place = folder / "register.bank"
    synthetic_bank(model, 12).save(place)
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    settings = ServerSettings(model=MODEL, folder=folder / "server", banks={BANK: place}, port=port)
    with ExitStack() as stack:
        stack.enter_context(serving(settings, machines, KEYS))
        client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers=bearer(SECRET), timeout=SECONDS
        )
        stack.enter_context(client)
        yield Server(client, model, place)


def body_of(question: str, **fields: Any) -> dict[str, Any]:
    """The body of a question to the bank."""
    messages = [{"role": "user", "content": question}]
    return {
        "model": f"{MODEL}@{BANK}",
        "messages": messages,
        "max_tokens": TOKENS,
        "k": 2,
        **fields,
    }


def questions_of(count: int, seed: int = 3) -> list[str]:
    """Different questions of some words each."""
    chooser = random.Random(seed)
    return [f"{number} {' '.join(chooser.choices(WORDS, k=3))}?" for number in range(count)]


def same(body: dict[str, Any], answer: Answer) -> bool:
    """Whether a body has text, citations, scores and confidence of an answer, to the bit."""
    cited = [
        {name: value for name, value in one.items() if name != "document_index"}
        for one in body["sedem"]["citations"]
    ]
    return (
        body["choices"][0]["message"]["content"] == answer.text
        and cited == json.loads(json.dumps([asdict(one) for one in answer.citations]))
        and body["sedem"]["confidence"] == answer.confidence
        and body["sedem"]["blocks"] == answer.blocks
    )


def compare(server: Server, questions: int) -> Counts:
    """Ask questions, and compare the answers with those of one machine."""
    found = [same(server.ask(one), server.expected(one)) for one in questions_of(questions)]
    return Counts(asked=questions, same=sum(found), wrong=questions - sum(found))


def streamed(server: Server, question: str) -> tuple[str, str | None]:
    """The text that came of a streamed answer, and the error that ended it, if one did."""
    text, error = "", None
    body = body_of(question, stream=True)
    with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            return "", f"status {response.status_code}"
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            part = json.loads(line.removeprefix("data: "))
            if "error" in part:
                error = str(part["error"]["message"])
            for choice in part.get("choices", ()):
                text += choice["delta"].get("content") or ""
    return text, error


def under_load(
    server: Server, questions: int, harm: Callable[[], None], at_once: int = 4
) -> Counts:
    """Stream answers while something is killed, and compare all that came.

    Args:
        harm: is called once a quarter of the answers are there.
        at_once: streams at the same time.
    """
    texts, counts = questions_of(questions, seed=8), Counts(asked=questions)
    wanted = {text: server.expected(text).text for text in texts}
    quarter, done = threading.Event(), []

    def one(text: str) -> tuple[str, str | None]:
        found = streamed(server, text)
        done.append(text)
        if len(done) * 4 >= questions:
            quarter.set()
        return found

    with ThreadPoolExecutor(at_once) as threads:
        answers = [threads.submit(one, text) for text in texts]
        assert quarter.wait(SECONDS), "the first answers have not come"
        harm()
        for text, answer in zip(texts, answers, strict=True):
            found, error = answer.result(SECONDS)
            if error is None and found == wanted[text]:
                counts.same += 1
            elif error is None or not wanted[text].startswith(found):
                counts.wrong += 1
            elif found:
                counts.broken += 1
            else:
                counts.refused += 1
    return counts


def kill_replica(name: str) -> None:
    """Kill the process of one replica of a deployment, such as "engine"."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(REPLICA + name):
                process.kill()
                return
    raise AssertionError(f"no replica of {name} runs")


def killed_host(questions: int) -> Counts:
    """Kill a host with an engine and copies of the selectors while questions run.

    Another host takes the replicas of the one that is lost.
    """
    with hosts(2, cpus=3) as cluster, tempfile.TemporaryDirectory() as folder:
        cluster.connect()
        machines = Machines(partitions=2, engines=2, copies=2)
        with served(Path(folder), machines) as server:

            def harm() -> None:
                cluster.hosts[-1].kill()
                cluster.start()

            return under_load(server, questions, harm)
