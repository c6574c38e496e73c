"""`sedem build` rejects hostile documents in one sentence, in a process with little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hostile.borders import hostile_paths

pytestmark = pytest.mark.slow

LIMITED = """
import resource, sys
from sedem.cli.main import app
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
app(sys.argv[1:])
"""


def test_the_command_refuses_hostile_documents(tmp_path: Path) -> None:
    name = "a\x1b]0;owned\x07.txt"
    for kind, path in hostile_paths(tmp_path / name, 2**41):
        if kind in ("NUL", "loop", "socket", "broken link"):
            continue  # no argument can have it, or as the others
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, "build", "a.bank", str(path)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1, (kind, done.stderr)
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert "\x1b" not in done.stderr and "Traceback" not in done.stderr
