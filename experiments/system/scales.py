"""The scales: backbones, sets, recipes and limits of each.

- nano: the backbone of sedem-nano and small files of the public sets, fully trained.
- paper: Llama-3.2 and the public sets by name.
- gpu: the bench of both on one GPU.

A result of one scale is never shown at another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from sedem_lab.data.examples import Example
from sedem_lab.data.question_sets import open_examples

ROOT = Path(__file__).parents[2]
RUNS = Path("runs")
FACTS = ROOT / "experiments" / "data" / "exact-facts-evaluation.jsonl.xz"
HOUSEHOLD = FACTS.with_name("household.jsonl.xz")
SHIPPED = ROOT / "checkpoints" / "sedem-nano"
SMOL = "smol"
"""The backbone of sedem-smol in `Scale.shipped`."""
STUDIED_DEPTH = 28
"""Layers of Llama-3.2-3B, the backbone of the paper's depth studies."""


@dataclass(frozen=True)
class Questions:
    """Evaluation questions of one set; no training recipe reads these records.

    Attributes:
        source: file under the data folder, or public name.
        limit: size of a seeded sample.
        k: the paper's K for this set.
        split: split of a public name.
        trained_for: the set that a model which answers it is trained for; empty means itself.
    """

    title: str
    source: str
    schema: str
    records: str | None = None
    limit: int | None = None
    k: int = 2
    max_new_tokens: int = 64
    split: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    trained_for: str = ""

    def found(self, data: Path) -> Path | str:
        """The file under the data folder, or the public name."""
        path = data / self.source
        return path if path.exists() else self.source

    def examples(self, data: Path) -> list[Example]:
        """Every question of the set."""
        opened = open_examples(
            self.found(data), self.schema, records=self.records, split=self.split, **self.options
        )
        return list(opened.examples)


@dataclass(frozen=True)
class Scale:
    """One scale.

    Attributes:
        backbones: backbones by the paper's short names; the small one is `nano`.
        depth: number of decoder layers of the backbone of the depth studies.
        studied: the backbone of the depth studies; None means the first.
        sets: evaluation questions by the paper's keys.
        ablation: sets used for the ablations.
        disabled: K and control that remove selection from an ablation. The paper restores every
            block instead of selecting, also in training. A small decoder has no positions for all
            blocks, so there the evidence is included among two.
        layers: extraction and injection layer of the recipes, on the backbone of the depth study,
            which shares what it trains with them.
        shipped: checkpoint of the guided model by backbone, if there is one.
        stages: recipes that train the main configuration, in order.
        limit: questions of an ablation.
        costly_limit: questions of what is slow on a CPU: every block, BM25's paragraphs as text,
            and trained baselines.
        slowest_limit: questions of methods that read a context several times.
        stage1: overrides of the study recipe of stage 1.
        gold_trained: a trained baseline that is given only gold documents was also trained only on
            them, as in the paper. At nano, its training was already close to that.
        dtype: type of the backbones in an evaluation.
        answer_tokens: most tokens of any answer; None means the limits of sets and cells.
        stand_in: whether backbones and records are stand-ins; see `stand_in`.
        changes: overrides of every recipe that is trained, as `--set` takes them.
    """

    name: str
    backbones: tuple[str, ...]
    depth: int
    sets: Mapping[str, Questions]
    ablation: tuple[str, ...]
    disabled: tuple[int | str, str] = (2, "gold")
    layers: tuple[int, int] | None = None
    shipped: Mapping[str, Path] = field(default_factory=dict)
    stages: tuple[str, ...] = ("stage1", "stage2")
    segment_lengths: tuple[int, ...] = (32, 64, 128, 256, 512)
    compressions: tuple[int, ...] = (2, 4, 8, 16)
    budgets: tuple[int, ...] = (2, 4, 6, 8, 10)
    limit: int | None = None
    costly_limit: int | None = None
    slowest_limit: int | None = None
    stage1: tuple[str, ...] = ()
    gold_trained: bool = True
    dtype: str = "bfloat16"
    studied: str | None = None
    answer_tokens: int | None = None
    stand_in: bool = False
    changes: tuple[str, ...] = ()

    @property
    def runs(self) -> Path:
        """Folder of the scale's runs, relative to the working folder of a command.

        Models that were trained with other settings have a folder of their own.
        """
        own = f"{self.name}-stand-in" if self.stand_in else self.name
        changes = (re.sub(r"[^\w.=]+", "_", change) for change in self.changes)
        return RUNS / "-".join((own, *changes))

    @property
    def size(self) -> str:
        """The name under which `bench` and others list what they measure at a scale."""
        return "stand-in" if self.stand_in else self.name

    def layer(self, studied: int) -> int:
        """The layer of this scale's backbone at the relative depth of one of the paper's 28."""
        return max(1, round(studied * self.depth / STUDIED_DEPTH))

    def recipe(self, stage: str, backbone: str, questions: str, every_block: bool = False) -> Path:
        """The recipe of a stage for an ablation (nano), or the paper's.

        Args:
            stage: "stage1" or "stage2".
            backbone: a backbone of the scale.
            questions: set that the paper's stage 2 is trained for.
            every_block: the stage 2 that restores every block instead of selecting.
        """
        if self.name != "paper":
            return ROOT / "recipes" / "nano" / f"{stage}-study.yaml"
        folder = ROOT / "recipes" / "paper" / backbone
        name = {"2wiki": "2wikimultihopqa"}.get(questions, questions)
        if every_block:
            name += "-all"
        return folder / ("stage1.yaml" if stage == "stage1" else f"stage2-{name}.yaml")

    def baseline_recipe(self, method: str, stage: str, backbone: str, setting: str = "") -> Path:
        """The recipe of a trained baseline; not every method has one on text.

        The setting follows the stage ("text" or "questions") in the file's name. Without a text
        recipe of its own, a setting starts from the common one.
        """
        folder = ROOT / "recipes" / (f"paper/{backbone}" if self.name == "paper" else "nano")
        own = folder / f"{method}-{stage}{setting}.yaml"
        return folder / f"{method}-text.yaml" if stage == "text" and not recipe_exists(own) else own


@cache
def recipe_exists(path: Path) -> bool:
    """Whether a recipe can be read; it need not have a file of its own."""
    from sedem.errors import ConfigError
    from sedem_lab.training.recipe import read_entries

    try:
        read_entries(path)
    except ConfigError:
        return False
    return True


def ruler(
    source: str, lengths: tuple[int, ...], limit: int, split: str | None = None, **options: Any
) -> dict[str, Questions]:
    """RULER qa_2 at several lengths, built from a HotpotQA source, by names like "ruler-4k"."""
    return {
        f"ruler-{length // 1024}k": Questions(
            *(f"RULER qa_2, {length // 1024}K", source, "ruler-qa2", None, limit),
            max_new_tokens=128,
            split=split,
            options={"length": length, "count": limit, **options},
            trained_for="hotpotqa",
        )
        for length in lengths
    }


SQUAD: dict[str, Any] = {"source": "squad/dev-24-articles.json", "schema": "squad"}
ARTICLES = "wikipedia/articles.jsonl.xz"
HOTPOT = "hotpotqa/hf-schema-300-b.jsonl"
COVID = "covidqa/covidqa-98-papers.json"

NANO = Scale(
    name="nano",
    backbones=("nano",),
    depth=12,
    gold_trained=False,
    sets={
        "hotpotqa": Questions("HotpotQA", HOTPOT, "hotpotqa"),
        "2wiki": Questions("2Wiki", "2wikimultihopqa/native-500.json", "2wikimultihopqa", "400:"),
        "musique": Questions("MuSiQue", "musique/native-100.json", "musique", "60:", k=4),
        "qasper": Questions("COVID-QA (for QASPER)", COVID, "covidqa", "70:", limit=200, k=8),
        "squad-10": Questions("SQuAD-10", limit=1000, **SQUAD),
        "squad-10-swapped": Questions(
            "SQuAD-10 with invented answers", limit=200, options={"swap": True}, **SQUAD
        ),
        "exact-facts": Questions("exact facts", str(FACTS), "own", limit=1000),
        "household": Questions("household papers", str(HOUSEHOLD), "own"),
        "two-steps": Questions(
            *("two-step facts", ARTICLES, "two-steps", "650:700"),
            split="evaluation",
            options={"count": 100},
        ),
        **ruler(HOTPOT, (4096, 8192, 16384), 50),
    },
    ablation=("squad-10", "exact-facts"),
    layers=(6, 6),
    shipped={"nano": SHIPPED, SMOL: SHIPPED.with_name("sedem-smol")},
    stages=("stage1-regress", "stage1", "stage2", "stage2-more", "stage2-pairs"),
    limit=150,
    costly_limit=100,
    slowest_limit=30,
)

VALIDATION: dict[str, Any] = {"split": "validation"}
# The paper stops at 16K.
LENGTHS = tuple(2**power for power in range(12, 18))

PAPER = Scale(
    name="paper",
    backbones=("llama-3.2-1b", "llama-3.2-3b", "llama-3.2-1b-to-3b"),
    depth=STUDIED_DEPTH,
    studied="llama-3.2-3b",
    layers=(14, 10),
    sets={
        "hotpotqa": Questions("HotpotQA", "hotpotqa", "hotpotqa", **VALIDATION),
        "2wiki": Questions("2Wiki", "2wikimultihopqa", "2wikimultihopqa", **VALIDATION),
        "musique": Questions("MuSiQue", "musique", "musique", k=4, **VALIDATION),
        "qasper": Questions("QASPER", "qasper", "qasper", k=8, max_new_tokens=128, **VALIDATION),
        "govreport": Questions(
            *("GovReport", "govreport", "govreport", None, 200),
            max_new_tokens=512,
            trained_for="hotpotqa",
            **VALIDATION,
        ),
        **ruler("hotpotqa", LENGTHS, 500, **VALIDATION),
    },
    ablation=("hotpotqa", "qasper"),
    disabled=("all", "selected"),
    segment_lengths=(32, 64, 128, 256, 512, 1024),
    limit=1000,
    stage1=("text.held_out=2000",),
)

GPU = replace(NANO, name="gpu")

SCALES = {scale.name: scale for scale in (NANO, PAPER, GPU)}
