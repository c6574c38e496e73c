"""The output of the steps of `experiments.gpu`, in files that are small enough to send."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

from experiments.system.gpu_scale import CANDIDATE
from experiments.system.step_processes import LOG, Step
from sedem.checkpoint.portable import BACKBONE

PART = 15 * 2**20
"""Maximum bytes of a part."""


def archive(out: Path, chosen: Iterable[Step], runs: Path, path: Path) -> list[Path]:
    """Write results, logs and the last two checkpoints of the candidate; remove earlier parts.

    Args:
        out: folder of the work.
        chosen: steps whose files are included if they exist.
        runs: the folder of the candidate's runs, relative to `out`.
        path: parts are PATH.0, PATH.1 and so on; together they are one tar.gz.

    Returns:
        The parts.
    """
    made = {step.made for step in chosen} | {Path(LOG)}
    made |= {file.relative_to(out) for file in (out / "logs").glob("*.log")}
    for name in CANDIDATE[-2:]:
        final = out / runs / name / "final"
        own = [file for file in final.rglob("*") if BACKBONE not in file.relative_to(final).parts]
        made |= {file.relative_to(out) for file in own}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=4) as tar:
        for name in sorted(made):
            if (out / name).is_file():
                tar.add(out / name, str(name))
    for old in path.parent.glob(f"{path.name}.[0-9]*"):
        old.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    content, parts = packed.getvalue(), []
    for number, start in enumerate(range(0, len(content), PART)):
        parts.append(path.with_name(f"{path.name}.{number}"))
        parts[-1].write_bytes(content[start : start + PART])
    return parts
