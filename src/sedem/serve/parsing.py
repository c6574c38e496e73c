"""Parse an uploaded file; PDF, Word and HTML in a process with limits of time and memory.

A file is untrusted, and a parser may loop or use all memory. The server continues in any case, and
the upload fails with one sentence that says why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sedem.data.document_formats import parse
from sedem.errors import DataError
from sedem.types import Document
from sedem.untrusted import DOCUMENT_BYTES, read_bytes

SECONDS = 120.0
"""Time limit for parsing one file; a PDF of a thousand pages takes about half a minute."""
MEMORY = 4 * 2**30
"""Limit of the process's address space, in bytes."""
PLAIN = (".txt", ".md")
"""Endings of files that are only decoded, so they are parsed in this process."""
ADVICE = "name its encoding, such as --encoding latin-1"
"""Advice of the command line that an upload cannot follow."""
POLL_SECONDS = 0.1


class StoppedError(Exception):
    """Parsing was stopped because its result is no longer needed."""


def parse_upload(
    path: Path,
    name: str,
    stopped: Callable[[], bool] = lambda: False,
    *,
    seconds: float = SECONDS,
    memory: int = MEMORY,
) -> Document:
    """Return an uploaded file as a document.

    Raises:
        DataError: it cannot be read, or takes too much time or memory; one sentence.
        StoppedError: `stopped` returned true.
    """
    if Path(name).suffix.lower() in PLAIN:
        return _parsed(path, name)
    # -P: nothing in the working folder is imported.
    command = [sys.executable, "-P", "-m", __name__, str(path), name, str(memory)]
    until = time.monotonic() + seconds
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    if stopped():
                        raise StoppedError from None
                    if time.monotonic() > until:
                        raise DataError(
                            f"reading '{name}' took more than {seconds:g} s and was stopped; save "
                            "it again or as plain text"
                        ) from None
        finally:
            process.kill()
    if process.returncode:
        raise DataError(f"'{name}' crashed its parser; save it again or as plain text")
    answer = json.loads(output)
    if "error" in answer:
        raise DataError(answer["error"])
    return Document(name, answer["text"], tuple(answer["pages"]))


def _parsed(path: Path, name: str) -> Document:
    try:
        text, pages = parse(Path(name), read_bytes(path, DataError, DOCUMENT_BYTES), "utf-8")
    except DataError as error:
        raise DataError(str(error).replace(ADVICE, "save it as UTF-8")) from None
    except FileNotFoundError:
        raise DataError(f"the upload '{name}' is not stored any more; upload it again") from None
    except MemoryError:
        raise DataError(f"reading '{name}' takes too much memory; split it") from None
    return Document(name, text, tuple(pages))


def _main(path: str, name: str, memory: str) -> None:
    """Parse one file and print the result as JSON: the process."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
        os.nice(5)  # answers have priority
    try:
        document = _parsed(Path(path), name)
        answer: dict[str, object] = {"text": document.text, "pages": document.pages}
    except DataError as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    _main(*sys.argv[1:])
