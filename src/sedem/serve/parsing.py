"""Parse uploaded files in a separate process, which is killed when it takes too long.

A file is untrusted, and a parser may loop or use all memory. Whatever happens there, the server
continues, and the file gets one sentence that says what happened.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sedem.data.document_formats import parse
from sedem.errors import DataError
from sedem.types import Document
from sedem.untrusted import DOCUMENT_BYTES, read_bytes

SECONDS = 120.0
"""Time limit for parsing one file; a PDF of a thousand pages takes about half a minute."""
START_SECONDS = 60.0
"""Time limit for starting the process, which imports the parsers."""
MEMORY = 4 * 2**30
"""Limit of the process's address space, in bytes."""
ENCODING = "utf-8"
ADVICE = "name its encoding, such as --encoding latin-1"
"""Advice of the command line that an upload cannot follow."""
_POLL = 0.1


class StoppedError(Exception):
    """Parsing was stopped because its result is no longer needed."""


class ParserProcess:
    """Parses files one at a time; the process starts with the first one.

    Args:
        seconds: time limit for parsing one file.
        memory: limit of the process's address space in bytes.
    """

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self.seconds, self.memory = seconds, memory
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._using = threading.Lock()

    def parse(self, path: Path, name: str, stopped: Callable[[], bool] = lambda: False) -> Document:
        """Return a file as a document.

        Args:
            path: where its bytes are.
            name: name of the document; its ending determines the format.
            stopped: polled regularly; once it is true, parsing is stopped.

        Raises:
            DataError: it cannot be read, or takes too much time or memory; one sentence.
            StoppedError: `stopped` returned true.
        """
        with self._using:
            try:
                answer = self._answer({"path": str(path), "name": name}, name, stopped)
            except (EOFError, OSError):
                self._end()
                raise DataError(
                    f"'{name}' crashed its parser; save it again or as plain text"
                ) from None
            except BaseException:
                self._end()
                raise
        if "error" in answer:
            raise DataError(answer["error"])
        return Document(name, answer["text"], tuple(answer["pages"]))

    def close(self) -> None:
        """End the process."""
        with self._using:
            self._end()

    def _answer(
        self, task: dict[str, str], name: str, stopped: Callable[[], bool]
    ) -> dict[str, Any]:
        pipe = self._started(stopped)
        pipe.send_bytes(json.dumps(task).encode())
        if not _ready(pipe, self.seconds, stopped):
            raise DataError(
                f"reading '{name}' took more than {self.seconds:g} s and was stopped; save it "
                "again or as plain text"
            )
        answer: dict[str, Any] = json.loads(pipe.recv_bytes())
        return answer

    def _started(self, stopped: Callable[[], bool]) -> Connection:
        if self._pipe is not None and self._process is not None and self._process.is_alive():
            return self._pipe
        self._end()
        # Not forked: the server has threads, and a model in memory that the parser must not see.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(theirs, self.memory), name="sedem-parser", daemon=True
        )
        self._process.start()
        theirs.close()
        if not _ready(self._pipe, START_SECONDS, stopped):
            raise DataError("the process that reads files did not start; upload the file again")
        self._pipe.recv_bytes()
        return self._pipe

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


def _ready(pipe: Connection, seconds: float, stopped: Callable[[], bool]) -> bool:
    """Wait until there is something to read; False if nothing arrives in time."""
    until = time.monotonic() + seconds
    while not pipe.poll(_POLL):
        if stopped():
            raise StoppedError
        if time.monotonic() > until:
            return False
    return True


def _work(pipe: Connection, memory: int) -> None:
    """Run the process: handle tasks until the server closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends it
    _limit_memory(memory)
    pipe.send_bytes(b"ready")
    while True:
        try:
            task = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(json.dumps(_parsed(Path(task["path"]), task["name"])).encode())


def _parsed(path: Path, name: str) -> dict[str, object]:
    try:
        content = read_bytes(path, DataError, DOCUMENT_BYTES)
        text, pages = parse(Path(name), content, ENCODING)
    except DataError as error:
        return {"error": str(error).replace(ADVICE, "save it as UTF-8")}
    except FileNotFoundError:
        return {"error": f"the upload '{name}' is not stored any more; upload it again"}
    except MemoryError:
        return {"error": f"reading '{name}' takes too much memory; split it"}
    return {"text": text, "pages": pages}


def _limit_memory(memory: int) -> None:
    if sys.platform == "win32":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    os.nice(5)  # answers have priority
