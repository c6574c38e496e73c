"""`sedem adapt`: both training stages on a user's own documents, without labels.

Everything is kept in a working folder next to the checkpoint, OUT.work: the documents, the
questions made from them, and a recipe and a run for each stage. Existing results are reused, so a
killed adaptation resumes. The recipes also work with `sedem train`, like any others.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from accelerate.utils import send_to_device
from pydantic import Field
from torch.utils.data import Subset
from tqdm.auto import tqdm
from transformers import set_seed

from sedem.backbone.decoder import Backbone
from sedem.checkpoint.folder import (
    EXTRA_ENTRIES,
    is_checkpoint,
    locate,
    open_named,
    portable_name,
    unfinished,
)
from sedem.checkpoint.hub import CARD_FILE
from sedem.checkpoint.model_card import SUMMARY_FILE, adapted_card
from sedem.checkpoint.untrained import middle_layer
from sedem.config import CONFIG_FILE, NumberFrom0, SedemConfig, Settings, Whole, WholeAbove0
from sedem.durable_files import write_text
from sedem.errors import CheckpointError, ConfigError, DataError
from sedem.types import Document
from sedem.untrusted import read_json
from sedem_lab.data.custom_questions import dump
from sedem_lab.data.document_questions import packed, questions, split_documents, tokens_of
from sedem_lab.data.windows import Windows
from sedem_lab.evaluation.results import write_json
from sedem_lab.provenance import provenance
from sedem_lab.training.block_batch import BlockCollator
from sedem_lab.training.block_dataset import BlockDataset
from sedem_lab.training.recipe import (
    DataSource,
    Mixture,
    Optimization,
    RunSettings,
    TextSource,
    as_yaml,
    load_recipe,
)
from sedem_lab.training.run_setup import FINAL, processes
from sedem_lab.training.sources import open_windows, read_mixture
from sedem_lab.training.stage1 import Stage1, Stage1Losses
from sedem_lab.training.stage2 import Stage2, Stage2Losses
from sedem_lab.training.stages import (
    CALIBRATED,
    Stage1Recipe,
    Stage2Data,
    Stage2Recipe,
    open_model,
    train_stage1,
    train_stage2,
)

DOCUMENTS, QUESTIONS, HELD_OUT = "documents.jsonl", "questions.jsonl", "held-out.jsonl"
"""Files of the working folder that the recipes read."""

BATCH = 8
"""Windows or questions per step."""
CONTINUATION = 64
"""Maximum tokens after a window that its memory is trained to predict."""
WINDOWS = 256
"""Maximum held-out windows whose losses are evaluated."""
PASSES = (8, 4)
"""Passes over windows and over questions, if the number of steps is within the bounds."""
FEWEST, MOST = (300, 200), (20_000, 10_000)
"""Minimum and maximum steps of stage 1 and of stage 2."""

NEW = {"compressor": 1e-4, "decompressor": 1e-3, "selector": 5e-4, "lora": 3e-4, "guidance": 1e-2}
"""Learning rates of untrained parts, as in the nano recipes."""
TRAINED = {**NEW, "decompressor": 2e-4, "selector": 2e-4}
"""Learning rates of parts from a checkpoint, as used to train sedem-nano further."""


class Adaptation(Settings):
    """A user's request to `sedem adapt`, apart from the documents.

    Attributes:
        backbone: folder or hub id of a backbone, or a checkpoint, which is trained further.
        steps: steps of both stages; None derives them from the size of the documents.
        compression: C; None means the checkpoint's, or the paper's.
        layer: layers before states are read and injected; None means half of the backbone's.
        segment_length: tokens of a block; None means the checkpoint's, or the paper's.
        held_out: share of the documents that is held out from training.
    """

    backbone: str
    steps: tuple[WholeAbove0, WholeAbove0] | None = None
    compression: WholeAbove0 | None = None
    layer: WholeAbove0 | None = None
    segment_length: WholeAbove0 | None = None
    held_out: Annotated[NumberFrom0, Field(gt=0, le=0.5)] = 0.1
    seed: Whole = 0


def start_of(wanted: Adaptation) -> tuple[SedemConfig, Backbone, str | None]:
    """Return the shape of the model, the backbone that reads, and the checkpoint to start from.

    The checkpoint is None for a plain backbone, whose other parts are new.

    Raises:
        ConfigError: the backbone cannot be used, or a checkpoint has another shape than requested.
        CheckpointError: weights are missing or damaged.
    """
    shape = {"segment_length": wanted.segment_length, "compression": wanted.compression}
    if not is_checkpoint(wanted.backbone):
        backbone = open_named(wanted.backbone, None, None, dtype=torch.bfloat16)
        layer = middle_layer(backbone, wanted.backbone, wanted.layer)
        config = SedemConfig(
            encoder=portable_name(wanted.backbone),
            extract_layers=(layer,),
            inject_layer=layer,
            block_context="independent",
            guidance=True,
        )
        given = {name: value for name, value in shape.items() if value is not None}
        return config.with_changes(**given), backbone, None
    folder = locate(wanted.backbone)
    config = SedemConfig.load(folder, extra=EXTRA_ENTRIES)
    for name, value in {**shape, "layer": wanted.layer}.items():
        found = getattr(config, "inject_layer" if name == "layer" else name)
        if value not in (None, found):
            raise ConfigError(
                f"{name} is {value}, but checkpoint '{wanted.backbone}' has {found}, which it "
                "keeps; leave it out, or adapt a backbone"
            )
    backbone = open_named(config.encoder, config.encoder_revision, folder, dtype=torch.bfloat16)
    # What was fitted to the old weights goes. Adapters are needed to learn to answer.
    config = config.with_changes(**dict.fromkeys(CALIBRATED, False))
    if not config.lora_rank:
        fields = SedemConfig.model_fields
        rank, alpha = fields["lora_rank"].default, fields["lora_alpha"].default
        config = config.with_changes(lora_rank=rank, lora_alpha=alpha)
    start = str(folder.resolve()) if Path(wanted.backbone).is_dir() else wanted.backbone
    return config, backbone, start


def steps_of(wanted: Adaptation, windows: int, questions: int) -> tuple[int, int]:
    """Steps of both stages: those requested, or several passes within bounds."""
    if wanted.steps is not None:
        return wanted.steps
    passes = windows * PASSES[0] // BATCH, questions * PASSES[1] // BATCH
    one, two = (
        min(max(steps, fewest), most)
        for steps, fewest, most in zip(passes, FEWEST, MOST, strict=True)
    )
    return one, two


def continuation_of(config: SedemConfig) -> int:
    """Tokens after a window; at most a window, because a span of the window may replace them."""
    return min(CONTINUATION, config.segment_length)


def recipes(
    wanted: Adaptation,
    config: SedemConfig,
    start: str | None,
    folder: Path,
    steps: tuple[int, int],
    held_out: int,
) -> tuple[Stage1Recipe, Stage2Recipe]:
    """The recipes of both stages, in the form that `sedem train` takes.

    Args:
        start: the checkpoint to start from; None means new parts.
        held_out: number of texts at the end of the documents that are held out.
    """
    rates, after = NEW if start is None else TRAINED, continuation_of(config)
    # A CPU without bfloat16 instructions emulates them, two to four times slower.
    half = torch.cuda.is_available()

    def shared(stage: str, parts: Sequence[str], count: int) -> dict[str, Any]:
        return {
            "model": config,
            "data_root": str(folder),
            "cache": str(folder / "cache"),
            "optimization": Optimization(
                learning_rates={name: rates[name] for name in parts},
                steps=count,
                batch_size=BATCH,
                warmup_ratio=0.05,
                weight_decay=0.01,
                bf16=half,
                backbone_dtype="bfloat16" if half else "float32",
                seed=wanted.seed,
            ),
            "run": RunSettings(
                output=str(folder / stage),
                log_every=max(1, count // 50),
                save_every=max(1, count // 20),
                keep=1,
            ),
        }

    first = Stage1Recipe(
        text=TextSource(
            path=DOCUMENTS, continuation=after, held_out=held_out, evaluation_windows=WINDOWS
        ),
        losses=_stage1_losses(config, new=start is None),
        start_from=start,
        **shared("stage1", ("compressor", "decompressor"), steps[0]),
    )
    return first, Stage2Recipe(
        start_from=str(folder / "stage1" / FINAL),
        data=Stage2Data(
            training=(DataSource(path=QUESTIONS),),
            evaluation=(DataSource(path=HELD_OUT),),
            max_blocks=12,
            budgets=(1, 2, 2, 4),
            # Caching frozen states is worth the disk space where steps are slow.
            cache_states=not half,
        ),
        losses=Stage2Losses(normalize_scores=True, reconstruct=0.0),
        **shared("stage2", tuple(NEW), steps[1]),
    )


def _stage1_losses(config: SedemConfig, *, new: bool) -> Stage1Losses:
    """The losses of sedem-nano; new parts learn the decoder's own states first."""
    if config.decompressor == "none":
        return Stage1Losses(distill=0.0, reconstruct=0.0)
    losses = Stage1Losses(reconstruct=0.5, recall=0.35)
    if config.cross_model:
        return losses  # the tokenizers may differ, so states would stand for different tokens
    return losses.with_changes(regress=1.0 if new else 0.1, regress_first=0.6 if new else 0.0)


Scores = dict[str, float]


def held_out_scores(
    first: Stage1Recipe, second: Stage2Recipe, start: str | None, what: str
) -> Scores:
    """Losses on held-out windows and questions, and recall of the blocks with the answers.

    Args:
        start: the checkpoint to measure; None means the new parts that stage 1 would start from.

    Returns:
        "text loss": per token after a window, from the memory of the window. "answer loss": per
        token of the answer, from the selector's k best blocks, with the model's default k.
        "recall@k": percentage of questions with the answer in one of these blocks.
    """
    seed = first.optimization.seed
    set_seed(seed)
    model = open_model(first.model, first.optimization, start).eval()
    length = first.model.segment_length
    _, windows = open_windows(first.text, first, model.encoder, length)
    assert windows is not None  # a recipe of `adapt` always holds some out
    stage1 = Stage1(model, Stage1Losses(distill=0.0, reconstruct=0.0)).eval()
    text = _means(stage1, windows, ("context",), f"{what}, text")

    dataset = BlockDataset(model, second.data.answer_limit, cache=Path(second.cache))
    mixture = Mixture(training=second.data.evaluation)
    read_mixture(dataset, mixture, Path(second.data_root), selects=True)
    # If a block boundary splits an answer, no block contains it, so there is nothing to find.
    found = [index for index in range(len(dataset)) if any(dataset[index].evidence)]
    k = second.model.k if isinstance(second.model.k, int) else second.model.auto_max
    collator = BlockCollator(
        dataset, max_blocks=dataset.most_blocks, budgets=(k,), seed=seed, cache=None
    )
    losses = Stage2Losses(reconstruct=0.0, conditioning="selected")
    stage2 = Stage2(model, losses, collator).eval()
    items = Subset(dataset, found)
    means = _means(stage2, items, ("answer", "recall"), f"{what}, questions")
    return {
        "text loss": text["context"],
        "answer loss": means["answer"],
        f"recall@{k}": 100 * means["recall"],
    }


@torch.no_grad()
def _means(
    stage: Stage1 | Stage2, items: Windows | Subset[Any], names: Sequence[str], what: str
) -> Scores:
    """Means of some loss parts over the items of a stage's dataset."""
    totals = dict.fromkeys(names, 0.0)
    with tqdm(total=len(items), desc=what) as bar:
        for start in range(0, len(items), BATCH):
            places = range(start, min(start + BATCH, len(items)))
            chosen: list[Any] = [items[index] for index in places]
            parts = stage(**send_to_device(stage.collate(chosen), stage.model.device))
            for name in names:
                totals[name] += len(chosen) * float(parts[name])
            bar.update(len(chosen))
    return {name: total / len(items) for name, total in totals.items()}


REQUEST_FILE, REPORT_FILE, BEFORE_FILE = "request.json", "adaptation.json", "before.json"
STAGE1_FILE, STAGE2_FILE = "stage1.yaml", "stage2.yaml"
MOST_QUESTIONS, MOST_HELD_OUT = 10_000, 200
"""Maximum questions made from the training documents, and from the held-out ones."""


@dataclass(frozen=True)
class Amounts:
    """Amount of data to train and to measure on.

    Attributes:
        held_out_documents: 0 if the held-out text is the last part of a single document.
        windows: approximate number of windows of stage 1.
        questions_not_used: number of questions left out because of the maximum.
    """

    documents: int
    tokens: int
    held_out_documents: int
    held_out_tokens: int
    windows: int
    questions: int
    questions_not_used: int
    held_out_questions: int


def working_folder(out: Path) -> Path:
    """The folder of an adaptation's data, recipes and runs."""
    return out.with_name(f"{out.name}.work")


def finished(wanted: Adaptation, documents: Sequence[Document], out: Path) -> dict[str, Any] | None:
    """The report of a finished adaptation; None if it is not finished.

    Raises:
        CheckpointError: the folder contains something else.
        ConfigError: the folder contains another adaptation.
    """
    if not out.exists():
        return None
    if not (out / REPORT_FILE).is_file():
        raise CheckpointError(f"'{out}' exists already; give the name of a new folder")
    report = read_json(out / REPORT_FILE, CheckpointError)
    _check_same(report["request"], _request(wanted, documents), out)
    return report


def prepare(
    wanted: Adaptation, documents: Sequence[Document], out: Path
) -> tuple[Amounts, tuple[int, int]]:
    """Write documents, questions and recipes into the working folder, unless they exist.

    Returns:
        The amount of data, and the steps of both stages.

    Raises:
        DataError: there is not enough text.
        ConfigError: the folder contains another adaptation, or the backbone cannot be used.
    """
    folder, request = working_folder(out), _request(wanted, documents)
    with processes().main_process_first():
        if not (folder / REQUEST_FILE).is_file():
            return _prepare(wanted, documents, folder, request)
        written = read_json(folder / REQUEST_FILE, CheckpointError)
        _check_same(written["request"], request, folder)
        one, two = written["steps"]
        return Amounts(**written["sizes"]), (one, two)


def _prepare(
    wanted: Adaptation, documents: Sequence[Document], folder: Path, request: dict[str, Any]
) -> tuple[Amounts, tuple[int, int]]:
    config, backbone, start = start_of(wanted)
    training, held_out = split_documents(documents, wanted.held_out, wanted.seed)
    learned = questions(training, training, count=MOST_QUESTIONS, seed=wanted.seed)
    asked = questions(held_out, [*training, *held_out], count=MOST_HELD_OUT, seed=wanted.seed)
    width = config.segment_length + continuation_of(config)
    texts = [packed(some, backbone, width) for some in (training, held_out)]
    tokens = [tokens_of(some, backbone) for some in texts]
    windows = [sum(count // width for count in some) for some in tokens]
    sizes = Amounts(
        documents=len(documents),
        tokens=sum(map(sum, tokens)),
        held_out_documents=len(held_out) if len(documents) > 1 else 0,
        held_out_tokens=sum(tokens[1]),
        windows=windows[0],
        questions=len(learned.examples),
        questions_not_used=sum(learned.noted.values()),
        held_out_questions=len(asked.examples),
    )
    enough = min(sizes.windows, sizes.questions) >= BATCH
    if not (enough and windows[1] and sizes.held_out_questions):
        raise DataError(
            f"the documents have {sizes.tokens:,} tokens, of which {sizes.held_out_tokens:,} are "
            f"held out; to train, {sizes.windows} windows of {width} tokens and {sizes.questions} "
            f"questions are left, and at least {BATCH} of each are needed; to measure, "
            f"{windows[1]} and {sizes.held_out_questions}, and one of each is needed: give more or "
            "longer documents"
        )
    steps = steps_of(wanted, sizes.windows, sizes.questions)
    folder.mkdir(parents=True, exist_ok=True)
    dump(learned.examples, folder / QUESTIONS)
    dump(asked.examples, folder / HELD_OUT)
    lines = [json.dumps({"text": text}, ensure_ascii=False) for some in texts for text in some]
    write_text(folder / DOCUMENTS, "".join(f"{line}\n" for line in lines))
    first, second = recipes(wanted, config, start, folder.resolve(), steps, len(texts[1]))
    write_text(folder / STAGE1_FILE, as_yaml(first))
    write_text(folder / STAGE2_FILE, as_yaml(second))
    entries = {"request": request, "sizes": asdict(sizes), "steps": steps}
    # Written last: a folder that contains this file is complete.
    write_json(folder / REQUEST_FILE, entries)
    return sizes, steps


def _request(wanted: Adaptation, documents: Sequence[Document]) -> dict[str, Any]:
    """The request, without folder and file names, which should not travel with a checkpoint."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(hashlib.sha256(document.text.encode()).digest())
    name = portable_name(wanted.backbone)
    backbone = Path(name).name if Path(name).is_absolute() else name
    return {**wanted.to_dict(), "backbone": backbone, "documents": digest.hexdigest()}


def _check_same(written: Mapping[str, Any], request: Mapping[str, Any], folder: Path) -> None:
    changed = [name for name in request if written.get(name) != request[name]]
    if changed:
        told = ", ".join(
            "the documents differ"
            if name == "documents"
            else f"{name} was {written.get(name)}, is {request[name]}"
            for name in changed
        )
        raise ConfigError(
            f"'{folder}' holds another adaptation ({told}); give the same arguments and documents "
            "to go on with it, give another --out, or remove it"
        )


def adapt(out: Path) -> dict[str, Any]:
    """Run the prepared training to its end, and write the checkpoint.

    Returns:
        The report, which the checkpoint also contains: request, sizes, steps, and scores on the
        held-out data before and after training.
    """
    folder, own = working_folder(out), processes()
    first = load_recipe(Stage1Recipe, folder / STAGE1_FILE)
    second = load_recipe(Stage2Recipe, folder / STAGE2_FILE)
    # Scores before any training are measured only once.
    if (folder / BEFORE_FILE).is_file():
        before: Scores = read_json(folder / BEFORE_FILE, CheckpointError)
    else:
        before = held_out_scores(first, second, first.start_from, "before")
        if own.is_main_process:
            write_json(folder / BEFORE_FILE, before)
    summaries = [Path(recipe.run.output) / SUMMARY_FILE for recipe in (first, second)]
    if not summaries[0].is_file():
        train_stage1(first)
    if not summaries[1].is_file():
        train_stage2(second)
    final = Path(second.run.output) / FINAL
    after = held_out_scores(first, second, str(final), "after")
    runs = [read_json(path, CheckpointError) for path in summaries]
    report = {
        **read_json(folder / REQUEST_FILE, CheckpointError),
        "batch": BATCH,
        "seconds": sum(run["seconds"] for run in runs),
        "trained_parameters": runs[-1]["trained_parameters"],
        "scores": {name: [before[name], after[name]] for name in after},
        **provenance(),
    }
    if own.is_main_process:
        # The checkpoint appears complete or not at all.
        with unfinished(out) as place:
            shutil.copytree(final, place, dirs_exist_ok=True)
            card = adapted_card(out.name, read_json(final / CONFIG_FILE, CheckpointError), report)
            write_text(place / CARD_FILE, card)
            write_json(place / REPORT_FILE, report)
    own.wait_for_everyone()
    return report
