"""`sedem bench` with what only studies need: peers, floors, building by stage, large banks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments.bench.details import (
    EncoderLayers,
    build_stages,
    measure_selection,
    selection_floor_ms,
)
from experiments.bench.floors import (
    Ceilings,
    Stages,
    Work,
    busy,
    floors,
    measure_ceilings,
    sedem_work,
    text_work,
)
from experiments.bench.peers import PEERS, PrefixCached
from experiments.bench.text_blocks import TextBlocks
from sedem.backbone.loading import open_backbone
from sedem.baselines.longllmlingua import LongLLMLingua
from sedem.bench import command
from sedem.bench.keeping import WarmSedem
from sedem.bench.measure import Trial, spread
from sedem.bench.plan import Plan
from sedem.demo import QUESTIONS
from sedem.evaluation.readers import BoundSedem
from sedem.evaluation.run import Progress
from sedem.types import Document


def run_bench(
    plan: Plan,
    out: Path | None = None,
    progress: Progress | None = None,
    *,
    peers: Sequence[str] = (),
    blocks: Sequence[int] = (),
) -> dict[str, Any]:
    """Run the bench of a study; see `sedem.bench.command.run_bench`.

    Args:
        plan: the methods, contexts and settings.
        out: folder of an interrupted run, which resumes.
        progress: called with the number of finished steps and of all steps.
        peers: names in `PEERS`, which are measured after the methods.
        blocks: sizes of synthetic banks that SeDeM scores.

    Returns:
        The document of the bench with `ceilings` of this process, `floor` in each row, and
        `selection` by number of blocks.
    """
    ceilings = measure_ceilings(plan.place, plan.type)
    document = command.run_bench(
        plan, out, progress, peers={name: PEERS[name] for name in peers}, detail=_Details(plan)
    )
    selection = _selection(plan, blocks) if blocks else {}
    # Measured before and after, so that neither warm-up nor other processes lower a ceiling.
    ceilings = ceilings.best_with(measure_ceilings(plan.place, plan.type))
    for rows in document["results"].values():
        for tokens, row in rows.items():
            row["floor"] = _floor(row["work"], int(tokens), ceilings)
    for row in selection.values():
        row["floor_ms"] = selection_floor_ms(row["work"], ceilings)
    document["notes"] += busy(document["results"])
    return {**document, "ceilings": asdict(ceilings), "selection": selection}


def _floor(
    work: Mapping[str, Any] | None, tokens: int, ceilings: Ceilings
) -> dict[str, float | None] | None:
    if work is None:
        return None
    stages = {stage: [Work(**part) for part in parts] for stage, parts in work.items()}
    return floors(stages, tokens, ceilings)


@dataclass
class _Details:
    """More of each method's row: `work` behind its floors, and SeDeM's building by stage."""

    plan: Plan
    layers: dict[int, EncoderLayers] = field(default_factory=dict)

    def __call__(self, trial: Trial, documents: Sequence[Document]) -> dict[str, Any]:
        subject, answer = trial.subject, trial.answer
        reader = subject.reader
        assert answer is not None
        work = self._work(trial)
        more: dict[str, Any] = {
            "work": work and {n: [asdict(part) for part in parts] for n, parts in work.items()},
            "layers_tok_s": None,
        }
        if isinstance(reader, TextBlocks):
            # It uses parts of two open models.
            more["memory"] = None
        elif isinstance(reader, PrefixCached):
            # For a truncated context, only the remaining tokens count.
            kept = answer.stored_bytes or 0
            tokens = trial.memory.ids.shape[1] - 1
            per_token = {"bytes_per_token": kept / tokens if tokens else None}
            more["kept"] = {**per_token, "ready": trial.ready, "blocks": answer.blocks}
        elif isinstance(reader, BoundSedem) and self.plan.online:
            more["build_stages"] = build_stages(reader.model, documents)
            if subject.name == "sedem":
                more["layers_tok_s"] = self._layers(reader, documents, answer.context_tokens or 0)
        return more

    def _work(self, trial: Trial) -> Stages | None:
        """The work behind the method's floor; None if the method's stages are not known."""
        subject, answer = trial.subject, trial.answer
        assert answer is not None
        reader, question = subject.reader, QUESTIONS[0]
        if isinstance(reader, BoundSedem):
            found = isinstance(reader, WarmSedem)
            return sedem_work(reader.model, answer, question, found=found)
        if subject.backbone is None or not subject.reads_text or isinstance(reader, LongLLMLingua):
            # LongLLMLingua reads the context several times to prune it, then reads the rest.
            return None
        cached = isinstance(reader, PrefixCached)
        return text_work(subject.backbone, answer, question, cached=cached)

    def _layers(
        self, reader: BoundSedem, documents: Sequence[Document], tokens: int
    ) -> dict[str, float]:
        """Tokens per second of Hugging Face's forward of the encoder's layers."""
        model = reader.model
        if id(model) not in self.layers:
            frozen = open_backbone(model.encoder.name, dtype=self.plan.type, device=self.plan.place)
            self.layers[id(model)] = EncoderLayers(model.config, frozen)
        layers = self.layers[id(model)]
        times = [layers.run_ms(documents) for _ in range(2 + self.plan.runs)]
        return spread([1e3 * tokens / time for time in times[2:]])


def _selection(plan: Plan, blocks: Sequence[int]) -> dict[str, Any]:
    """Times of scoring synthetic banks, by their number of blocks."""
    with command.checkpoint_of(plan) as checkpoint:
        alone = plan.with_changes(methods=("sedem",), kept=("cold",))
        (subject, *_), _ = command.open_subjects(alone, checkpoint)
        reader = subject.reader
        assert isinstance(reader, BoundSedem)
        return {
            str(count): measure_selection(reader, count, QUESTIONS[0], plan.runs)
            for count in blocks
        }
