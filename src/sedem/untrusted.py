"""Limits of what others send or wrote, and readers that keep them; errors are one sentence.

No reader here waits for a pipe, reads a device, expands an alias or recurses without limit. Each
takes the class of the error to raise, and a limit in bytes. A missing file stays a
FileNotFoundError, because only the caller knows what it was needed for. What a library parses runs
`apart`, in a process with limits of time and memory; what was found out so is `remembered`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from sedem import errors
from sedem.durable_files import bytes_text, write_text
from sedem.errors import ConfigError, DataError, SedemError, first_line, is_safe

DOCUMENT_BYTES = 2**28
"""Limit of one document."""
JSON_BYTES = 2**30
"""Limit of a JSON file that is read whole, such as a data set that is one object."""
SETTINGS_BYTES = 2**24
"""Limit of a JSON file of settings or figures."""
YAML_BYTES = 2**15
"""Limit of a YAML file or value; its parser takes seconds for a megabyte."""
LINE_CHARACTERS = 2**25
"""Limit of a line of a JSON Lines file."""
DEPTH = 64
"""Limit of nested lists and objects."""
PARSER_SECONDS, PARSER_BYTES = 120, 2**31
"""Limits of time and memory for the parser of a document, which the environment may change by the
variables SEDEM_PARSER_SECONDS and SEDEM_PARSER_BYTES. A PDF of a thousand pages takes half a
minute."""
TEMPLATE_SECONDS, TEMPLATE_BYTES, TEMPLATE_CHARACTERS = 30, 2**29, 2**18
"""Limits of time, memory and output for a chat template; half of the memory is transformers'."""
TOKENIZER_SECONDS, TOKENIZER_BYTES = 60, 2**32
"""Limits of time and memory for trying a tokenizer."""
POLL_SECONDS = 0.1
"""How often a process apart is checked."""
HEAD_BYTES, HEADERS = 2**16, 100
"""Limits of the head of an HTTP request."""
HEAD_SECONDS = 30.0
"""Time limit for the head of an HTTP request, and of a body, plus that for its bytes."""
BODY_VALUES = 10_000
"""Limit of the values in a body of JSON, whatever they are: messages, parts, fields, entries."""
BODY_RATE = 2**13
"""Bytes per second that a body has to arrive at after that time."""

CACHE = "SEDEM_CACHE"
"""The variable that names another folder for caches."""
READ_WHOLE = (".json", ".jinja", ".txt", ".model")
"""Endings of files in the folder of a model that libraries read whole."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_OPENING = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
_TOO_DEEP = f"nests lists or objects more than {DEPTH} deep; flatten it"


def is_folder(path: Path) -> bool:
    """Whether a path is a folder; also False for an invalid name."""
    return os.path.isdir(path)


def exists(path: Path) -> bool:
    """Whether there is a file or folder; also False for an invalid name."""
    return os.path.exists(path)


def check_file(path: Path, error: type[SedemError], limit: int | None = None) -> None:
    """Refuse anything but a regular file, before it is opened by name.

    Links are followed.

    Raises:
        SedemError: of the class `error`: it is a folder, a pipe, a socket or a device, cannot be
            inspected, or is too large.
        FileNotFoundError: there is no such file.
    """
    try:
        _check(os.stat(path), path, error, limit)
    except (OSError, ValueError) as problem:
        raise _unreadable(path, problem, error) from None


def open_file(path: Path, error: type[SedemError], limit: int | None = None) -> IO[bytes]:
    """Open a regular file for reading.

    Raises:
        SedemError: as `check_file`, or the file may not be read.
        FileNotFoundError: there is no such file.
    """
    check_file(path, error, limit)
    try:
        # What was a file a moment ago may be a pipe now; opening it must not wait.
        descriptor = os.open(path, os.O_RDONLY | _OPENING)
    except OSError as problem:
        raise _unreadable(path, problem, error) from None
    try:
        _check(os.fstat(descriptor), path, error, limit)
    except SedemError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def too_large(path: object, size: int, limit: int, error: type[SedemError]) -> SedemError:
    """Return the error for a file of `size` bytes, of which at most `limit` are read."""
    given, most = bytes_text(size), bytes_text(limit)
    return error(f"'{path}' has {given}, at most {most} are read; give a smaller file")


def check_folder(folder: Path, error: type[SedemError], pattern: str = "**/*") -> None:
    """Refuse a folder of a model with a file that must not be read.

    It is a pipe or a device, a link that leads out of the folder, or is too large for a file that
    is read whole. Links of the hub's cache lead to another folder of the same repository.

    Args:
        pattern: the files; by default, also those in folders inside.

    Raises:
        SedemError: of the class `error`; it names the file.
    """
    home = folder.resolve()
    home = home.parents[1] if home.parent.name == "snapshots" else home
    for path in sorted(folder.glob(pattern)):
        if path.is_symlink() and not path.resolve().is_relative_to(home):
            raise error(f"'{path}' is a link that leads out of '{folder}'; put the file there")
        if not is_folder(path):
            limit = DOCUMENT_BYTES if path.suffix.lower() in READ_WHOLE else None
            with suppress(FileNotFoundError):  # a broken link
                check_file(path, error, limit)


def read_bytes(path: Path, error: type[SedemError], limit: int) -> bytes:
    """Read a regular file.

    Raises:
        SedemError: as `open_file`.
        FileNotFoundError: there is no such file.
    """
    with open_file(path, error, limit) as file:
        try:
            content = file.read(limit + 1)
        except OSError as problem:
            raise _unreadable(path, problem, error) from None
    if len(content) > limit:
        raise too_large(path, len(content), limit, error)
    return content


def read_text(path: Path, error: type[SedemError], limit: int) -> str:
    """Read a UTF-8 file.

    Raises:
        SedemError: as `open_file`, or it is not UTF-8.
        FileNotFoundError: there is no such file.
    """
    try:
        return read_bytes(path, error, limit).decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(
            f"'{path}' is not UTF-8 text ({problem.reason} at byte {problem.start}); save it as "
            "UTF-8"
        ) from None


def read_json(path: Path, error: type[SedemError], limit: int = SETTINGS_BYTES) -> Any:
    """Read a JSON file.

    Raises:
        SedemError: as `read_text` and `parse_json`.
        FileNotFoundError: there is no such file.
    """
    return parse_json(read_text(path, error, limit), f"'{path}'", error)


def parse_json(text: str, place: str, error: type[SedemError]) -> Any:
    """Parse JSON from a `place`, which the message names.

    Raises:
        SedemError: it is not JSON, nests too deeply, repeats a key of an object or has a number
            with too many digits.
    """

    def unrepeated(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):  # readers would disagree about its value
            [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise error(f"{place} has an object with the key '{twice}' twice; remove one")
        return entries

    try:
        value = json.loads(text, object_pairs_hook=unrepeated)
    except RecursionError:
        raise error(f"{place} {_TOO_DEEP}") from None
    except json.JSONDecodeError as problem:
        line = f"line {problem.lineno}, " if "\n" in text else ""
        at = f"{line}column {problem.colno}"
        raise error(f"{place} is not JSON: {problem.msg} at {at}") from None
    except ValueError:
        raise error(f"{place} has a number with too many digits; shorten it") from None
    level = [value]
    for _ in range(DEPTH + 1):
        level = [
            entry
            for parent in level
            if isinstance(parent, dict | list)
            for entry in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(entry, dict | list)
        ]
        if not level:
            return value
    raise error(f"{place} {_TOO_DEEP}")


def check_unicode(text: str, what: str) -> None:
    """Refuse text with lone surrogates, which no file or tokenizer can represent.

    Raises:
        DataError: there is one; the message has its place, after `what`.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} is not Unicode text ({text[error.start]!a} at character {error.start}); "
            "decode it with the right encoding"
        ) from None


def json_text(value: object) -> str:
    r"""Return a value as JSON in one line; unsafe characters become its `\u` escapes."""
    text = json.dumps(value, ensure_ascii=False)
    # Outside of strings JSON is ASCII, so only characters of strings are replaced.
    if text.isprintable():
        return text
    return "".join(c if is_safe(c) else json.dumps(c)[1:-1] for c in text)


def parse_yaml(text: str, subject: str, error: type[SedemError]) -> Any:
    """Parse YAML without aliases, which may expand to more than fits in memory.

    Args:
        subject: start of the message, such as "'recipe.yaml' is".

    Raises:
        SedemError: it is not YAML, too long, too deep, has an alias or an invalid value.
    """
    import yaml

    if len(text) > YAML_BYTES:
        raise error(f"{subject} YAML of more than {YAML_BYTES:,} characters; shorten it")
    try:
        depth = -1  # of the outermost list or mapping: 0
        for event in yaml.parse(text, yaml.SafeLoader):
            starts = isinstance(event, yaml.CollectionStartEvent)
            depth += starts - isinstance(event, yaml.CollectionEndEvent)
            alias = isinstance(event, yaml.AliasEvent)
            if alias or depth > DEPTH:
                words = "aliases (*name) are not read; repeat the value"
                words = words if alias else f"it nests more than {DEPTH} deep"
                raise yaml.YAMLError(f"{words} {event.start_mark}")
        loader = yaml.SafeLoader(text)
        nodes = [outermost := loader.get_single_node()]
        while nodes:
            node = nodes.pop()
            if isinstance(node, yaml.SequenceNode):
                nodes += node.value
            elif isinstance(node, yaml.MappingNode):
                # PyYAML takes the last of several values without a word.
                for key, count in Counter(str(key.value) for key, _ in node.value).items():
                    if count > 1:
                        raise yaml.YAMLError(f"key '{key}' is given {count} times; keep one")
                nodes += [value for _, value in node.value]
        return outermost and loader.construct_document(outermost)
    except yaml.YAMLError as problem:
        reason = str(problem)
    # A value such as 2024-99-99 raises the error of its Python type's constructor.
    except (ValueError, ArithmeticError, AttributeError, TypeError, LookupError) as problem:
        reason = f"a value cannot be read ({problem})"
    raise error(f"{subject} not YAML: {' '.join(reason.split())}")


class LimitError(SedemError):
    """What ran apart needs more time or memory than it may have; the message says "needs ..."."""


class StoppedError(Exception):
    """What ran apart was stopped because its result is no longer needed."""


def apart(
    call: str,
    *arguments: Any,
    seconds: float,
    memory: int,
    stopped: Callable[[], bool] = lambda: False,
) -> Any:
    """Call a function in a process of its own, with limits of time and memory.

    Args:
        call: the function, as "module:name"; its arguments and its result are JSON.
        memory: bytes that the process may allocate.
        stopped: says that the result is no longer needed; it is called again and again.

    Raises:
        LimitError: it takes more, or the system killed its process.
        StoppedError: `stopped` returned true.
        SedemError: the function raised it; the class is the same.
        ValueError: it raised another error, whose first line this has; or its process died of its
            own, or could not be started.
    """
    # -P: nothing in the working folder is imported.
    command = [sys.executable, "-P", "-m", __name__, str(seconds), str(memory), call]
    given: bytes | None = json.dumps(arguments).encode()
    until = time.monotonic() + seconds
    slow = LimitError(f"needs more than {seconds:g} s")
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        raise ValueError(f"no process could be started: {error.strerror}") from None
    with process:
        try:
            while True:
                try:
                    output, _ = process.communicate(given, timeout=POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    given = None  # it is being sent
                    if stopped():
                        raise StoppedError from None
                    if time.monotonic() > until:
                        raise slow from None
        finally:
            process.kill()
    if not output:
        code, large = process.returncode, LimitError(f"needs more than {memory >> 20:,} MB")
        by = signal.Signals(-code).name if code < 0 else f"status {code}"
        # Libraries without an error for too little memory end with SIGABRT.
        by_system = LimitError("needs more memory than the system has")
        ends = {"SIGALRM": slow, "SIGABRT": large, "SIGKILL": by_system}
        raise ends.get(by) or ValueError(f"its process died with {by}")
    match answer := json.loads(output):
        case {"result": result}:
            return result
        case {"kind": "MemoryError"}:
            raise LimitError(f"needs more than {memory >> 20:,} MB")
    kind = getattr(errors, answer["kind"], ValueError)
    raise kind(answer["message"])


def parser_limits() -> dict[str, Any]:
    """Return the limits of the parser of a document, as arguments of `apart`.

    Raises:
        ConfigError: a variable of the environment is not a number above 0.
    """
    limits = {"seconds": PARSER_SECONDS, "memory": PARSER_BYTES}
    for name, variable in (("seconds", "SEDEM_PARSER_SECONDS"), ("memory", "SEDEM_PARSER_BYTES")):
        if given := os.environ.get(variable):
            if not (given.isascii() and given.isdecimal() and 0 < int(given) < 2**60):
                raise ConfigError(f"{variable} is '{given}'; give a number above 0")
            limits[name] = int(given)
    return limits


def _run_apart(seconds: str, memory: str, call: str) -> None:
    """Call a function and write its result as JSON: the process."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no result
    if sys.platform != "win32":
        import resource

        with suppress(ValueError):  # the system allows less
            resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))
        signal.setitimer(signal.ITIMER_REAL, float(seconds) + 1)  # if nobody waits any more
        os.nice(5)  # answers have priority
    try:
        module, _, name = call.partition(":")
        answer = json.dumps({"result": getattr(import_module(module), name)(*json.load(sys.stdin))})
    except BaseException as error:
        kind = "MemoryError" if _lacks_memory(error) else type(error).__name__
        said = str(error) if isinstance(error, SedemError) else first_line(error)
        answer = json.dumps({"kind": kind, "message": said})
    output.write(answer)


def _lacks_memory(error: BaseException | None) -> bool:
    """Whether an error is, or comes from, a lack of memory."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _check(found: os.stat_result, path: Path, error: type[SedemError], limit: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
        raise error(f"'{path}' is {kind}; give a file")
    if limit is not None and found.st_size > limit:
        raise too_large(path, found.st_size, limit, error)


def _unreadable(path: Path, problem: Exception, error: type[SedemError]) -> Exception:
    """Return the error to raise for a failed open or read; FileNotFoundError is kept."""
    if isinstance(problem, FileNotFoundError):
        return problem
    reason = problem.strerror if isinstance(problem, OSError) else str(problem)
    return error(f"'{path}' cannot be read: {reason}")


# What was found out, kept for the next process


def cache_folder(kind: str) -> Path:
    """Return the folder of what can be fetched or computed again, such as "banks"."""
    if given := os.environ.get(CACHE):
        return Path(given).expanduser().resolve() / kind
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home).resolve() / "sedem" / kind


def remembered(kind: str, asked: str, find: Callable[[], str]) -> str:
    """Return a text that takes long to find, and keep it in the cache if that is possible.

    Args:
        asked: what the text depends on.
    """
    note = cache_folder(kind) / hashlib.sha256(asked.encode()).hexdigest()
    if note.is_file():
        return note.read_text("utf-8")
    text = find()
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        write_text(note, text)
    return text


def state_of(file: Path) -> str:
    """Return what changes if a file is replaced or written."""
    state = file.stat()
    return f"{file.resolve()} {state.st_size} {state.st_mtime_ns} {state.st_ino}"


if __name__ == "__main__":
    _run_apart(*sys.argv[1:])
