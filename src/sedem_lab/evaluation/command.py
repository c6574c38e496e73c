"""`sedem eval`: from names on a command line to metrics."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sedem.answering.decoding import ANSWER_LIMIT, LONG_ANSWER_LIMIT
from sedem.checkpoint.folder import BACKBONE, EXTRA_ENTRIES, locate
from sedem.config import SedemConfig
from sedem.durable_files import sha256
from sedem_lab.baselines.registry import find, reader_class
from sedem_lab.baselines.settings import method_of
from sedem_lab.data.question_sets import counts_tokens, identify, open_examples, sniff
from sedem_lab.evaluation.config import EvaluationConfig, MethodSettings, QuestionSettings
from sedem_lab.evaluation.readers import open_method
from sedem_lab.evaluation.run import Progress, evaluate, sample

LONG_ANSWERS = ("qasper", "ruler-qa2")
"""Schemas with the long answer limit (appendix Implementation Details)."""

SEEDED = ("squad", "exact-facts", "cloze")
"""Schemas whose contexts are drawn with a seed."""


def run_evaluation(
    config: EvaluationConfig, out: Path | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Evaluate a method on a set of questions.

    Args:
        out: folder for predictions and metrics; None keeps nothing.
        progress: called with the number of finished examples and the number of examples.

    Returns:
        Metrics with intervals, counts, settings and provenance.

    Raises:
        SedemError: a setting is not allowed, or the data or the checkpoint cannot be read.
    """
    # The data decides its schema and its answer limit, if they are not set.
    schema = config.schema_name or sniff(config.data)
    limit = LONG_ANSWER_LIMIT if schema in LONG_ANSWERS else ANSWER_LIMIT
    config = config.with_changes(schema_name=schema, max_new_tokens=config.max_new_tokens or limit)
    identity = identify(config.data, config.split)
    # The examples, before sampling.
    options: dict[str, Any] = {"seed": config.seed} if schema in SEEDED else {}
    if counts_tokens(schema):
        # That of the backbone which reads the context.
        folder = locate(config.checkpoint)
        if (method := method_of(folder)) == "sedem":
            encoder = SedemConfig.load(folder, extra=EXTRA_ENTRIES).encoder
            options["tokenizer"] = str(folder) if encoder == BACKBONE else encoder
        else:
            options["tokenizer"] = reader_class(method).Config.load(folder).backbone
    examples = open_examples(
        config.data,
        schema,
        records=config.records,
        split=config.split,
        revision=identity.get("revision"),
        **{**options, **config.options},
    )
    # The files that decide a method's answers: all weights, or only those of the backbone.
    folder = locate(config.checkpoint)
    weights = (folder / BACKBONE if find(config.method).frozen else folder).rglob("*.safetensors")
    settings = {
        "method": config.method,
        **identity,
        "weights_sha256": sha256(*sorted(weights)),
        # The name of the data may be a local path; `identity` says which data it is.
        **config.model_dump(include=QuestionSettings.model_fields.keys() - {"data"}, by_alias=True),
        **config.model_dump(include=set(MethodSettings.model_fields)),
        "dropped": dict(examples.dropped),
    }
    opened = open_method(config.method, config)
    chosen = sample(examples.examples, config.limit, config.seed)
    if opened.backbone is not None:
        # A checkpoint may only name its backbone, and that name may later refer to another one.
        settings["backbone_digest"] = opened.backbone.digest
    with nullcontext(out) if out else tempfile.TemporaryDirectory() as kept:
        return evaluate(opened, chosen, settings, Path(str(kept)), progress)
