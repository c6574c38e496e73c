"""Adds the reference of the command line to the site, made from the commands themselves."""

from __future__ import annotations

import subprocess
import sys

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGE = "cli.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page: typer's own documentation of `sedem`.

    Args:
        files: of the site.
        config: of the site.
    """
    command = [sys.executable, "-m", "typer", "sedem.cli.main", "utils", "docs", "--name", "sedem"]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    files.append(File.generated(config, PAGE, content=made.stdout))
    return files
