"""A child process whose changes to files are seen, stopped, cut short or refused one by one.

The child is traced with ptrace(2), so changes that SQLite and safetensors make count as well. This
needs Linux on x86-64.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

WORKS = sys.platform == "linux" and platform.machine() == "x86_64"

TRACEME, GETREGS, SETREGS, SYSCALL, SETOPTIONS = 0, 12, 13, 24, 0x4200
OPTIONS = 1 | 2 | 4 | 8 | 0x100000  # system calls are marked, children traced, all end with us
AT_SYSCALL = signal.SIGTRAP | 0x80
NAMES = (
    "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss "
    "fs_base gs_base ds es fs gs"
).split()
WRITES = {1: "write", 18: "pwrite64", 20: "writev", 296: "pwritev", 40: "sendfile"}
COPY_RANGE = 326
SYNCS = (74, 75)
TRUNCATES = (77, 285)
MODES = (91, 93)
PATHS = {  # number: kind, argument that is the path, argument that is its folder
    2: ("open", 0, None),
    85: ("open", 0, None),
    257: ("open", 1, 0),
    76: ("truncate", 0, None),
    83: ("mkdir", 0, None),
    258: ("mkdir", 1, 0),
    84: ("unlink", 0, None),
    87: ("unlink", 0, None),
    263: ("unlink", 1, 0),
    82: ("rename", 0, None),
    264: ("rename", 1, 0),
    316: ("rename", 1, 0),
    86: ("link", 0, None),
    265: ("link", 1, 0),
    90: ("mode", 0, None),
    268: ("mode", 1, 0),
}
SECOND = {82: (1, None), 86: (1, None), 264: (3, 2), 265: (3, 2), 316: (3, 2)}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class _Registers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in NAMES]

    def argument(self, index: int) -> int:
        return int(getattr(self, ("rdi", "rsi", "rdx", "r10", "r8", "r9")[index]))


@dataclass
class Change:
    """A system call that changes a file or a folder, or makes a change durable.

    Attributes:
        kind: "create", "truncate", "write", "rename", "link", "unlink", "mkdir", "sync" or "mode".
        path: of the file or folder.
        target: the second path of a rename or link.
        offset: where a write begins in the file.
        data: what a write wrote.
        size: of a file that was truncated or enlarged.
    """

    kind: str
    path: Path
    target: Path | None = None
    offset: int = 0
    data: bytes = b""
    size: int = 0


@dataclass(frozen=True)
class Fate:
    """What becomes of a change.

    Attributes:
        kill: the child is killed before it; with `half`, after it.
        half: of a write, the first half alone is written.
        errno: it fails.
    """

    kill: bool = False
    half: bool = False
    errno: int = 0


Decide = Callable[[int, Change], Fate | None]


def go_on(_: int, __: Change) -> Fate | None:
    """Let every change happen."""
    return None


@dataclass
class Trace:
    """What a child did.

    Attributes:
        changes: those that happened, in order.
        killed: whether the child was killed.
        error: name and text of the exception that ended it; empty if it finished.
    """

    changes: list[Change]
    killed: bool = False
    error: str = ""

    @property
    def finished(self) -> bool:
        """Whether the child got to its end, so that everything it did is promised."""
        return not self.killed and not self.error


def trace(action: Callable[[], object], root: Path, decide: Decide = go_on) -> Trace:
    """Run a function in a child process and watch what it changes in a folder, `root`.

    An exception ends the child. `decide` is asked before each change, with its number.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _be_traced(action, writer)
    os.close(writer)
    os.waitpid(child, 0)
    _ptrace(SETOPTIONS, child, OPTIONS)
    traced = _Traced(child, root.resolve(), decide)
    traced.run()
    with os.fdopen(reader, "rb") as pipe:
        error = pipe.read().decode()
    return Trace(traced.changes, traced.killed, error)


def _be_traced(action: Callable[[], object], writer: int) -> None:
    # A connection that was opened before the fork must not be closed by the child.
    gc.disable()
    os.setpgid(0, 0)
    _ptrace(TRACEME, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        action()
    except BaseException as error:
        os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os._exit(0)


class _Traced:
    """Follows a child from one system call to the next."""

    def __init__(self, child: int, root: Path, decide: Decide) -> None:
        self.child = child
        self.root = root
        self.decide = decide
        self.changes: list[Change] = []
        self.killed = False
        self._number = 0
        self._inside: dict[int, tuple[Change | None, Fate | None]] = {}

    def run(self) -> None:
        _ptrace(SYSCALL, self.child, 0)
        while True:
            thread, status = os.waitpid(-self.child, 0x40000000)
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                if thread == self.child:
                    return
                continue
            stopped = os.WSTOPSIG(status)
            deliver = 0
            if stopped == AT_SYSCALL:
                self._at_syscall(thread)
            elif stopped not in (signal.SIGTRAP, signal.SIGSTOP):
                deliver = stopped
            if not self.killed:
                _ptrace(SYSCALL, thread, deliver)

    def _at_syscall(self, thread: int) -> None:
        registers = _Registers()
        _ptrace(GETREGS, thread, ctypes.addressof(registers))
        if thread not in self._inside:
            self._inside[thread] = self._enter(thread, registers)
            return
        change, fate = self._inside.pop(thread)
        result = ctypes.c_longlong(registers.rax).value
        if fate is not None and fate.errno:
            registers.rax = 2**64 - fate.errno
            _ptrace(SETREGS, thread, ctypes.addressof(registers))
        elif change is not None and result >= 0:
            self._finish(thread, registers, change, result)
        if fate is not None and fate.kill:
            self._kill()

    def _enter(self, thread: int, registers: _Registers) -> tuple[Change | None, Fate | None]:
        change = self._parse(thread, registers)
        if change is None:
            return None, None
        fate = self.decide(self._number, change)
        self._number += 1
        if fate is None:
            return change, None
        if fate.errno:
            registers.orig_rax = 2**64 - 1  # no system call, so nothing happens
        elif fate.half and change.kind == "write":
            registers.rdx = max(registers.rdx // 2, 1)
        else:
            self._kill()
            return change, fate
        _ptrace(SETREGS, thread, ctypes.addressof(registers))
        return change, fate

    def _kill(self) -> None:
        self.killed = True
        os.kill(self.child, signal.SIGKILL)

    def _parse(self, thread: int, registers: _Registers) -> Change | None:
        """The change that a system call is about to make; None if it makes none in the folder."""
        number = int(registers.orig_rax)
        if number in PATHS:
            kind, path, folder = PATHS[number]
            change = Change(kind, self._path(thread, registers, path, folder))
            if number in SECOND:
                change.target = self._path(thread, registers, *SECOND[number])
        else:
            change = self._of_descriptor(thread, registers, number)
        if change is None or not change.path.is_relative_to(self.root):
            return None
        exists = os.path.lexists(change.path)
        if change.kind == "open":
            flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
            if number != 85:
                flags = registers.argument(PATHS[number][1] + 1)
            change.kind = "truncate" if exists else "create"
            changes = flags & (os.O_TRUNC if exists else os.O_CREAT)
            return change if changes else None
        if change.kind == "truncate":
            change.size = registers.argument(1)
        return None if change.kind == "mkdir" and exists else change

    def _of_descriptor(self, thread: int, registers: _Registers, number: int) -> Change | None:
        kinds = {
            **dict.fromkeys([*WRITES, COPY_RANGE], "write"),
            **dict.fromkeys(SYNCS, "sync"),
            **dict.fromkeys(TRUNCATES, "truncate"),
            **dict.fromkeys(MODES, "mode"),
        }
        if number not in kinds:
            return None
        descriptor = registers.argument(2 if number == COPY_RANGE else 0)
        path = Path(os.readlink(f"/proc/{thread}/fd/{descriptor}"))
        if not path.is_absolute() or not path.exists():
            return None
        change = Change(kinds[number], path)
        if number == TRUNCATES[0]:
            change.size = registers.argument(1)
        elif number == TRUNCATES[1]:
            enlarged = registers.argument(2) + registers.argument(3)
            change.size = max(enlarged, path.stat().st_size)
        return change

    def _finish(self, thread: int, registers: _Registers, change: Change, result: int) -> None:
        """Record a change that happened; a write is read back from the file."""
        if change.kind == "write":
            number = int(registers.orig_rax)
            if number in (18, 296):
                change.offset = registers.argument(3)
            else:
                descriptor = registers.argument(2 if number == COPY_RANGE else 0)
                told = Path(f"/proc/{thread}/fdinfo/{descriptor}").read_text()
                change.offset = int(told.split()[1]) - result
            with change.path.open("rb") as file:
                file.seek(change.offset)
                change.data = file.read(result)
        self.changes.append(change)

    def _path(self, thread: int, registers: _Registers, path: int, folder: int | None) -> Path:
        with FileIO(f"/proc/{thread}/mem") as memory:
            memory.seek(registers.argument(path))
            name = os.fsdecode(_until_zero(memory))
        base = f"/proc/{thread}/cwd"
        if folder is not None:
            descriptor = ctypes.c_int(registers.argument(folder) & 0xFFFFFFFF).value
            base = base if descriptor < 0 else f"/proc/{thread}/fd/{descriptor}"
        return Path(os.path.normpath(Path(os.readlink(base), name)))


def _until_zero(memory: FileIO) -> bytes:
    text = b""
    while b"\0" not in text:
        # A read may not cross into a page that is not there.
        position = memory.tell()
        text += memory.read(4096 - position % 4096)
    return text.partition(b"\0")[0]


def _ptrace(request: int, process: int, data: int) -> None:
    if _libc.ptrace(request, process, 0, data) < 0 and ctypes.get_errno() != 3:
        raise OSError(ctypes.get_errno(), f"ptrace {request}")
