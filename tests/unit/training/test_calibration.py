"""Features of questions with and without their evidence, and the fit to them."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch

from sedem import Document, SeDeM
from sedem.data.examples import Evidence, Example, ExampleSet
from sedem.errors import DataError
from sedem.guidance.scores import confidence_features
from sedem.training import calibration
from sedem.training.calibration import LEAST, calibrate, evidence_features


def features_of(model: SeDeM, documents: list[Document], question: str) -> torch.Tensor:
    """The features of a question to a bank of these documents alone."""
    tokens = len(model.encoder.token_ids(question))
    return confidence_features(model.scores(model.read(documents), question), tokens)


def test_features_are_those_of_banks_with_and_without_the_documents_with_evidence(
    model: SeDeM, examples: ExampleSet
) -> None:
    usable = [example for example in examples.examples if len(example.documents) > 1]
    features, present = evidence_features(model, usable)
    assert present.tolist() == [True, False] * len(usable)
    for number, example in enumerate(usable):
        gold = example.evidence[0].document
        others = [d for n, d in enumerate(example.documents) if n != gold]
        expected = [
            features_of(model, list(example.documents), example.question),
            features_of(model, others, example.question),
        ]
        found = features[2 * number : 2 * number + 2]
        torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-4)


def test_where_every_document_has_evidence_only_its_blocks_are_left_out(model: SeDeM) -> None:
    text = "The rent is 900 euros. " * 8
    document = Document("lease.txt", text)
    example = Example("q", (document,), "What is the rent?", ("900",), (Evidence(0, 20, 40),))
    features, present = evidence_features(model, [example])
    bank = model.read([document])
    scores = model.scores(bank, example.question)
    kept = [n for n, block in enumerate(bank.blocks) if block.end <= 20 or block.start >= 40]
    assert 0 < len(kept) < len(bank)
    tokens = len(model.encoder.token_ids(example.question))
    torch.testing.assert_close(features[0], confidence_features(scores, tokens))
    torch.testing.assert_close(features[1], confidence_features(scores[kept], tokens))
    assert present.tolist() == [True, False]


def test_questions_without_evidence_or_with_nothing_else_are_left_out(
    model: SeDeM, examples: ExampleSet
) -> None:
    first = examples.examples[0]
    whole = Evidence(0, 0, len(first.documents[0].text))
    left_out = [
        replace(first, id="unlabelled", evidence=()),
        replace(first, id="all", documents=first.documents[:1], evidence=(whole,)),
    ]
    features, present = evidence_features(model, left_out)
    assert len(features) == len(present) == 0


def test_a_confidence_is_fitted_to_the_first_questions_and_measured_on_the_last(
    model: SeDeM, examples: ExampleSet
) -> None:
    usable = [example for example in examples.examples if len(example.documents) > 1]
    chosen = [
        replace(example, id=f"{example.id} {n}", question=f"{example.question} {n}")
        for n, example in enumerate(islice(cycle(usable), 40))
    ]
    with pytest.raises(DataError, match=rf"4 of 4 questions have .* at least {LEAST} are"):
        calibrate(model, examples.examples)
    found = calibrate(model, [*chosen, replace(chosen[0], id="unlabelled", evidence=())])
    assert (found.fitted, found.held_out, found.left_out) == (30, 10, 1)
    features, present = evidence_features(model, chosen)
    expected = calibration.Confidence()
    expected.fit(features[:60], present[:60])
    torch.testing.assert_close(found.part.weight, expected.weight)
    with torch.no_grad():
        confidence = expected(features[60:])
    assert found.auroc == pytest.approx(calibration.auroc(confidence, present[60:]))
    assert found.to_dict()["auroc"] == round(found.auroc, 4)
