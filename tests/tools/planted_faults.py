"""Plant faults in a copy of the source, one at a time, and count those that the tests detect.

    python tests/tools/planted_faults.py [NUMBER...]

A fault replaces a fragment of code that occurs once in its room; "" is the whole source. The tests
of the room run first, and then, if they notice nothing, those that `make test` runs.
"""

from __future__ import annotations

# ruff: noqa: E501
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("src", "tests", "experiments", "recipes", "checkpoints", "docs", "pyproject.toml",
          "constraints.txt", "README.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml")  # fmt: skip

FAULTS = (
    ("method", "mask_SMC1.sum(2).clamp_min(1)", "mask_SMC1.sum(2).clamp_min(2)"),
    ("method", "rank_C < slot_tokens_KJ", "rank_C <= slot_tokens_KJ"),
    ("method", "keys_SThd.shape[-1] ** 0.5", "keys_SThd.shape[-1]"),
    ("method", "self.epsilon)\n", "self.epsilon + 1)\n"),
    ("method", "F.gelu(self.w_1(self.norm(memory_JD)))", "F.gelu(self.w_1(memory_JD))"),
    ("method", "mean_where(1 - mean_S, mask_ST.any(1))", "(1 - mean_S).mean()"),
    ("method", "direction + pool_weight * pooled", "direction + pooled"),
    ("method", "temperature).log_softmax(-1)\n    teacher", "temperature).softmax(-1)\n    teacher"),
    ("method", "log_p_BN.sum(1) / positives_B.clamp_min(1)", "log_p_BN.sum(1)"),
    ("method", "blocks_BN & ~evidence_BN", "~evidence_BN"),
    ("method", "margin - scores_BN[:, :, None]", "margin + scores_BN[:, :, None]"),
    ("method", "scores.append(total_BN / heads)", "scores.append(total_BN)"),
    ("method", ".where(slot_mask_BL, -torch.inf)", ".where(slot_mask_BL, 0.0)"),
    ("method", "descending=True, stable=True).indices[:count]\n", "descending=False, stable=True).indices[:count]\n"),
    ("method", "self.next_position = self.next_position + 1", "self.next_position = self.next_position + 0"),
    ("method", "[:, 1:] for layer in layers", "[:, :-1] for layer in layers"),
    ("method", "range(length - min(shift, room), tokens, length)", "range(length - shift, tokens, length)"),
    ("guidance", "lead / question_tokens", "lead / 1"),
    ("guidance", "< mass).sum()) + 1", "< mass).sum())"),
    ("guidance", "min(max(count, least), len(best_K))", "min(max(count, 1), len(best_K))"),
    ("guidance", "scores_BK - best_B1", "scores_BK"),
    ("method", "(key[:, :, 1:], value[:, :, 1:])", "(key[:, :, :-1], value[:, :, 1:])"),
    ("bank", "removed IS NULL OR removed > ?", "removed IS NULL OR removed >= ?"),
    ("bank", "missing = -len(tokens_L) % block_slots", "missing = len(tokens_L) % block_slots"),
    ("bank", ".masked_fill(~real, LAST_CHARACTER).amin(1)", ".masked_fill(~real, 0).amin(1)"),
    ("bank", "_mark_removed(connection, name, version)\n            self._purge", "self._purge"),
    ("bank", "has != needs", "False"),
    ("bank", "not memory_NJD.is_finite()", "False"),
    ("bank", "synchronous = FULL", "synchronous = OFF"),
    ("bank", "in (\"cell_size_check\", ", "in ("),
    ("bank", "oldest > version", "False"),
    ("bank", " | (blocks.ends > characters_N)", ""),
    ("bank", "if query(connection, held, document.name, ", "if 0 and query(connection, held, document.name, "),
    ("engine", "device=real_BU.device).repeat_interleave(states)", "device=real_BU.device).repeat(states)"),
    ("engine", "columns] = block[:, 1]", "columns] = block[:, 0]"),
    ("engine", "self._order.popitem(last=False)", "self._order.popitem(last=True)"),
    ("backbone", "lora_alpha=alpha,", "lora_alpha=rank,"),
    ("", "digest.update(self.encoder.digest.encode())", "digest.update(b\"\")"),
    ("engine", "alpha=1 / _LARGEST", "alpha=1 / 128"),
    ("engine", "row_of[place], place_of[row] = row, place", "row_of[place], place_of[row] = row, row"),
    ("engine", ">= need.prefix + need.steps:", "> need.prefix + need.steps:"),
    ("answering", "if token in self.end_ids:", "if token == self.end_ids[0]:"),
    ("answering", "len(self.ids) >= self.decoding.max_new_tokens", "len(self.ids) > self.decoding.max_new_tokens"),
    ("answering", "self.text[: min(starts)]", "self.text[: max(starts)]"),
    ("answering", "withheld = max(withheld, size)", "withheld = size"),
    ("selecting", "scores_N = scores_N.masked_fill(~among_N, -torch.inf)", "scores_N = scores_N.masked_fill(~among_N, 0.0)"),
    ("selecting", "confidence < plan.min_confidence", "confidence <= plan.min_confidence"),
    ("selecting", "score_words(plan.bank, context, postings), share", "score_words(plan.bank, context, postings), 1.0"),
    ("selecting", "accumulate(sizes, max if apart else None)", "accumulate(sizes, max)"),
    ("answering", "manual_seed(self.seed)", "manual_seed(0)"),
)  # fmt: skip


def plant(folder: Path, room: str, old: str, new: str) -> None:
    """Replace a fragment in the one file of a room that has it.

    Raises:
        SystemExit: no file has it, or several places do.
    """
    place = folder / "src" / "sedem" / room
    files = sorted(place.rglob("*.py")) or [place.with_suffix(".py")]
    found = [path for path in files if old in path.read_text("utf-8")]
    if len(found) != 1 or found[0].read_text("utf-8").count(old) != 1:
        raise SystemExit(f"{old!r} occurs in {len(found)} files of '{room}', or several times")
    found[0].write_text(found[0].read_text("utf-8").replace(old, new), "utf-8")


def detects(folder: Path, *tests: str) -> bool:
    """Whether tests fail."""
    paths = os.pathsep.join(str(folder / part) for part in ("src", "", "tests"))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "-p", "no:cacheprovider"]
    run = subprocess.run([*command, *tests], cwd=folder, env=environment, capture_output=True)
    return run.returncode != 0


def main() -> None:
    """Plant the faults, and print which are detected."""
    chosen = [int(number) for number in sys.argv[1:]] or range(len(FAULTS))
    detected = 0
    for number in chosen:
        room, old, new = FAULTS[number]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            for name in COPIED:
                (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(
                    ROOT / name, folder / name
                )
            plant(folder, room, old, new)
            own = folder / "tests" / "unit" / room
            found = (own.is_dir() and detects(folder, str(own))) or detects(folder)
        detected += found
        print(f"{number}: {'detected' if found else 'MISSED'}: {room}: {old!r}", flush=True)
    print(f"{detected} of {len(chosen)} faults were detected")


if __name__ == "__main__":
    main()
