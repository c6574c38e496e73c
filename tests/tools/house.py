"""Print how large the project is, as the table in CONTRIBUTING.md: python tests/tools/house.py

The walks are counted by a profile of two commands on the bundled documents and sedem-nano.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import typer.main

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PACKAGES = [SOURCE / name for name in ("sedem", "sedem_serve", "sedem_lab")]
CORE = f"{PACKAGES[0]}/"
"""Where the files of the core are; the checkout itself may be called sedem."""
EQUATIONS = ("compress", "block_scores", "decompress", "prefill")
"""Functions that compute equations 4 to 8, and the prefill."""


def lines(folder: Path) -> tuple[int, int]:
    """Lines and number of the Python files in a folder."""
    files = [path for path in folder.rglob("*.py") if "__pycache__" not in path.parts]
    return sum(len(path.read_text("utf-8").splitlines()) for path in files), len(files)


def words() -> int:
    """Words of the documentation."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return sum(len(path.read_text("utf-8").split()) for path in pages)


def crossings() -> int:
    """Imports of one room by another."""
    found = 0
    for path in SOURCE.rglob("*.py"):
        package, room = (part.removesuffix(".py") for part in path.relative_to(SOURCE).parts[:2])
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sedem"):
                found += (node.module or "").split(".")[:2] != [package, room]
    return found


def loaded() -> int:
    """Modules of the package that `from sedem import SeDeM` loads."""
    count = "print(sum(name.startswith('sedem') for name in sys.modules))"
    code = f"import sys; from sedem import SeDeM; {count}"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


def parameters() -> int:
    """Arguments and options of all commands, without --help."""
    from sedem.cli.main import app

    commands: list[Any] = [typer.main.get_command(app)]
    for command in commands:
        below = command.list_commands(None) if hasattr(command, "list_commands") else ()
        commands += [command.get_command(None, name) for name in below]
    return sum(len(command.params) for command in commands)


class Walk:
    """The files and functions of the core that ran, and how deep each equation was called.

    Functions are in the order of their first calls, with the number of calls on the stack then.
    `files_until` has the number of files before each equation ran. `opened` has the names of those
    that ran after the model was opened, without comprehensions.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: dict[str, int] = {}
        self.depths: dict[str, int] = {}
        self.files_until: dict[str, int] = {}
        self.opened: set[str] | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "return" and code.co_qualname == "SeDeM.from_pretrained":
            self.opened = set()
        is_function = event == "call" and code.co_flags & inspect.CO_OPTIMIZED
        if not is_function or not code.co_filename.startswith(CORE):
            return
        self.files.add(code.co_filename)
        module = frame.f_globals["__name__"].removeprefix("sedem.")
        name = f"{module}.{code.co_qualname}"
        if self.opened is not None and not code.co_name.startswith("<"):
            self.opened.add(name)
        if name in self.functions and code.co_name not in EQUATIONS:
            return
        calls = sum(above.f_code.co_filename.startswith(CORE) for above in _above(frame))
        self.functions.setdefault(name, calls)
        if code.co_name in EQUATIONS:
            self.files_until.setdefault(code.co_name, len(self.files))
            self.depths[code.co_name] = max(self.depths.get(code.co_name, 0), calls)


def _above(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def walk(*arguments: str) -> Walk:
    """Run a command in this process, and return what it passed through."""
    from sedem.cli.main import app

    seen = Walk()
    with contextlib.redirect_stdout(io.StringIO()):
        sys.setprofile(seen)
        try:
            app([*arguments], standalone_mode=False)
        finally:
            sys.setprofile(None)
    return seen


def rows() -> Iterator[tuple[str, str]]:
    """Yield the names and values of all figures."""
    count, modules = lines(SOURCE)
    yield "source, lines (modules)", f"{count:,} ({modules})"
    for package in PACKAGES:
        count, modules = lines(package)
        yield f"of which {package.name}", f"{count:,} ({modules})"
        for room in sorted(path.parent for path in package.glob("*/__init__.py")):
            yield f"{package.name}, {room.name}", f"{lines(room)[0]:,}"
    count, modules = lines(ROOT / "experiments")
    yield "experiments, lines (modules)", f"{count:,} ({modules})"
    yield "recipes, files", str(len([*(ROOT / "recipes").rglob("*.yaml")]))
    yield "tests, lines", f"{lines(ROOT / 'tests')[0]:,}"
    yield "docs, words", f"{words():,}"
    yield "imports between rooms", str(crossings())
    yield "modules that `from sedem import SeDeM` loads", str(loaded())
    yield "parameters of the command line", str(parameters())
    with tempfile.TemporaryDirectory() as folder:
        bank = f"{folder}/a.bank"
        document = PACKAGES[0] / "demo" / "harbour-register.txt"
        for _ in range(2):  # what is imported by the first run is not counted
            built = walk("build", bank, str(document))
            asked = walk("ask", bank, "Who is the mayor of Belholm?")
            bank = f"{folder}/b.bank"
    yield "files that a document passes through into a bank", str(len(built.files))
    yield "files that `sedem ask` passes through", str(len(asked.files))
    yield (
        "the same, until states are injected (after equation 8)",
        str(asked.files_until["prefill"]),
    )
    for name, walked in (("`sedem build`", built), ("`sedem ask`", asked)):
        yield f"functions that {name} calls once its model is open", str(len(walked.opened or ()))
    depths = built.depths | asked.depths
    yield (
        "calls from the command to equations 4 to 8",
        f"{min(depths.values())} to {max(depths.values())}",
    )


def main() -> None:
    """Print the table."""
    print(f"On {datetime.now(UTC):%Y-%m-%d}:\n\n| | |\n|---|--:|")
    for name, value in rows():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
