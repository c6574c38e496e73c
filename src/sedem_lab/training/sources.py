"""Opening the text and the questions that a recipe names."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

from sedem.backbone.decoder import Backbone
from sedem.errors import ConfigError, DataError
from sedem_lab.data.corpus import TokenizedCorpus, hub_id
from sedem_lab.data.hub import HOMES
from sedem_lab.data.question_sets import open_examples
from sedem_lab.data.windows import Windows
from sedem_lab.training.example_dataset import ExampleDataset
from sedem_lab.training.recipe import DataSource, Mixture, Recipe, TextSource

logger = logging.getLogger(__name__)

UNLABELLED = "without any positive block"


def open_windows(
    source: TextSource, recipe: Recipe, backbone: Backbone, length: int
) -> tuple[Windows, Windows | None]:
    """Open the text of a recipe as training windows, and those of the held-out texts, if any.

    Raises:
        ConfigError: `held_out` leaves no text to train on.
    """
    corpus = TokenizedCorpus.open(
        source.path if hub_id(source.path) else Path(recipe.data_root) / source.path,
        backbone,
        Path(recipe.cache),
        source.exclude_titles,
        source.tokens,
        source.shard_seed,
        source.field,
        source.join,
    )
    if source.held_out >= len(corpus):
        raise ConfigError(
            f"text.held_out is {source.held_out}, the corpus has {len(corpus)} texts; "
            "some must be left to train on"
        )
    border = len(corpus) - source.held_out
    width, seed = (length, source.continuation), recipe.optimization.seed
    windows = Windows(corpus, *width, seed, range(border), source.windows)
    if source.windows is not None and source.windows > len(windows):
        logger.warning(
            "text.windows asks for %d windows, the text that is read has %d; raise text.tokens "
            "or give more text",
            source.windows,
            len(windows),
        )
    if not source.held_out:
        return windows, None
    held_out = range(border, len(corpus))
    return windows, Windows(corpus, *width, 0, held_out, source.evaluation_windows)


def read_mixture(
    dataset: ExampleDataset[Any], data: Mixture, data_root: Path, *, selects: bool = False
) -> tuple[Subset[Any], Subset[Any] | None]:
    """Read the sources of a mixture into a dataset; see `read_source`.

    Returns:
        The items to train on, and the items to evaluate; None without `data.evaluation`.
    """
    trained: list[int] = []
    for source in data.training:
        trained += read_source(
            dataset, source, data_root, selects=selects, evidence_only=data.evidence_only
        )
    first = len(dataset)
    for source in data.evaluation:
        read_source(dataset, source, data_root, selects=selects)
    evaluated = range(first, len(dataset))
    return Subset(dataset, trained), Subset(dataset, evaluated) if evaluated else None


def read_source(
    dataset: ExampleDataset[Any],
    source: DataSource,
    data_root: Path,
    *,
    selects: bool = False,
    evidence_only: bool = False,
) -> list[int]:
    """Read one source into a dataset, and log how many examples it gave and how they are labelled.

    Args:
        selects: whether a selector learns from the labels of the dataset's blocks.
        evidence_only: leave out and count the examples without any positive block.

    Returns:
        The indices of the source's items that are not left out.

    Raises:
        DataError: positive blocks are needed, and the source has none.
    """
    location, options = located(source, data_root)
    examples = open_examples(location, source.set, records=source.records, **options)
    before, dropped, by_answer = len(dataset), dataset.dropped.copy(), dataset.by_answer
    dataset.add(examples, source.label, source.repeat)
    told = {"labelled by answer string": dataset.by_answer - by_answer}
    used = list(range(before, len(dataset)))
    if selects or evidence_only:
        labelled = [index for index in used if any(dataset[index].evidence)]
        if used and not labelled:
            raise DataError(
                f"'{source.path}' cannot train a selector: none of its "
                f"{len(used) // source.repeat} examples has a block with evidence or with an "
                "answer string; label the evidence, give answers in the words of the documents, or "
                "set losses.select to 0 and data.evidence_only to false"
            )
        unlabelled = (len(used) - len(labelled)) // source.repeat
        if evidence_only:
            used = labelled
            dataset.dropped += Counter({UNLABELLED: unlabelled})
        else:
            told[UNLABELLED] = unlabelled
    logger.info(
        "%s: %d examples (%d in an epoch); left out: %s%s",
        examples.name,
        len(examples.examples),
        len(used),
        dict(examples.dropped + (dataset.dropped - dropped)) or "none",
        "".join(f"; {what}: {count}" for what, count in told.items() if count),
    )
    return used


def located(source: DataSource, data_root: Path) -> tuple[str | Path, dict[str, Any]]:
    """Where to read a source from, and the options of its reader.

    A path under `data_root` takes precedence over a public name, whose training split is read.
    """
    location, options = data_root / source.path, dict(source.options)
    if location.exists() or source.path not in HOMES:
        return location, options
    return source.path, {"split": "train", **options}
