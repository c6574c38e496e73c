"""Features of questions with and without their evidence, and the fit to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
from unit.training.blocks import repeated

from sedem import Document, SeDeM
from sedem.bank.index import Word, Words, score_words
from sedem.errors import ConfigError, DataError
from sedem.guidance import (
    SECOND_FEATURES,
    SPAN_FEATURES,
    UNKNOWN,
    SecondReading,
    SpanScorer,
    confidence_features,
)
from sedem_lab.data.examples import Evidence, Example, ExampleSet
from sedem_lab.data.question_sets import open_examples
from sedem_lab.evaluation.run import sample
from sedem_lab.training import calibration
from sedem_lab.training.calibration import (
    MINIMUM,
    ScoredQuestion,
    calibrate,
    compare_spans,
    fit_word_weight,
    read_examples,
    recipe_examples,
    score_examples,
)
from sedem_lab.training.recipe import DataSource
from sedem_lab.training.stages import Stage2Recipe


def scored(model: SeDeM, examples: Sequence[Example]) -> list[ScoredQuestion]:
    return score_examples(model, examples, read_examples(model, examples))


def features_of(model: SeDeM, documents: list[Document], question: str) -> torch.Tensor:
    """The features of a question to a bank of these documents alone."""
    bank, tokens = model.read(documents), len(model.encoder.token_ids(question))
    words, states = score_words(bank, question), model.scores(bank, question)
    best = int((states + model.config.word_weight * words.scores).argmax())
    return confidence_features(states, tokens, words.covered(best))


def test_features_are_those_of_banks_with_and_without_the_documents_with_evidence(
    model: SeDeM, examples: ExampleSet
) -> None:
    usable = [example for example in examples.examples if len(example.documents) > 1]
    for question, example in zip(scored(model, usable), usable, strict=True):
        gold = example.evidence[0].document
        others = [d for n, d in enumerate(example.documents) if n != gold]
        expected = [
            features_of(model, list(example.documents), example.question),
            features_of(model, others, example.question),
        ]
        by_both = model.config.with_changes(selection="both")
        for bank, features in zip((question, question.without_evidence()), expected, strict=True):
            torch.testing.assert_close(bank.features(by_both), features, atol=1e-5, rtol=1e-4)
            states = bank.features(model.config.with_changes(selection="states"))
            torch.testing.assert_close(states, torch.tensor([*features[:2], UNKNOWN]))


def test_where_every_document_has_evidence_only_its_blocks_are_left_out(model: SeDeM) -> None:
    text = "The rent is 900 euros. " * 8
    document = Document("lease.txt", text)
    example = Example("q", (document,), "What is the rent?", ("900",), (Evidence(0, 20, 40),))
    (question,) = scored(model, [example])
    bank = model.read([document])
    scores = model.scores(bank, example.question)
    kept = [n for n, block in enumerate(bank.blocks) if block.end <= 20 or block.start >= 40]
    assert 0 < len(kept) < len(bank)
    tokens = len(model.encoder.token_ids(example.question))
    by_states = model.config.with_changes(selection="states")
    rest = question.without_evidence().features(by_states)
    torch.testing.assert_close(question.features(by_states), confidence_features(scores, tokens))
    torch.testing.assert_close(rest, confidence_features(scores[kept], tokens))
    best = max(float(score) for n, score in enumerate(scores) if n not in kept)
    for one, score in zip(question.alone(), (best, float(scores[kept[0]])), strict=True):
        expected = torch.tensor([score / tokens, 0.0, UNKNOWN])
        torch.testing.assert_close(one.features(by_states), expected)


def test_questions_without_evidence_or_with_nothing_else_are_left_out(
    model: SeDeM, examples: ExampleSet
) -> None:
    first = examples.examples[0]
    whole = Evidence(0, 0, len(first.documents[0].text))
    left_out = [
        replace(first, id="unlabelled", evidence=()),
        replace(first, id="all", documents=first.documents[:1], evidence=(whole,)),
    ]
    assert scored(model, left_out) == []


def test_a_confidence_is_fitted_to_the_first_questions_and_measured_on_the_last(
    model: SeDeM, examples: ExampleSet
) -> None:
    chosen = [
        replace(one, question=f"{one.question} {n}") for n, one in enumerate(repeated(examples, 40))
    ]
    with pytest.raises(DataError, match=rf"4 of 4 questions have .* at least {MINIMUM} are"):
        calibrate(model, examples.examples, answer="free")
    unlabelled = replace(chosen[0], id="unlabelled", evidence=())
    found = calibrate(model, [*chosen, unlabelled], answer="free")
    assert (found.fitted, found.held_out, found.left_out) == (30, 10, 1)
    questions = scored(model, chosen)
    config = model.config.with_changes(**found.settings)
    pairs = [(one, one.without_evidence()) for one in questions]
    features = torch.stack([bank.features(config) for pair in pairs for bank in pair])
    alone = torch.stack([bank.features(config) for one in questions[:30] for bank in one.alone()])
    present = torch.tensor([True, False]).repeat(40)
    expected = calibration.Confidence()
    expected.fit(torch.cat([features[:60], alone]), present[:60].repeat(2))
    torch.testing.assert_close(found.parts["confidence"].weight, expected.weight)
    with torch.no_grad():
        confidence = expected(features[60:])
    assert found.auroc == pytest.approx(calibration.auroc(confidence, present[60:]))
    told = found.to_dict()
    assert told["auroc"] == round(found.auroc, 4) and told["fitted"] == 30
    assert told["calibration_error"] == round(found.calibration_error, 4) and "parts" not in told


@pytest.mark.parametrize(("states", "words"), [(1.0, 0.0), (0.0, 1.0), (0.7, 0.3)])
def test_the_weight_of_words_is_that_under_which_evidence_is_likeliest(
    states: float, words: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(60):
        both = torch.randn(2, 12, generator=generator)
        evidence = torch.zeros(12, dtype=torch.bool)
        likely = (4 * torch.tensor([states, words]) @ both).softmax(0)
        evidence[likely.multinomial(1, generator=generator)] = True
        found = Word("rent", np.arange(12), both[1].numpy(), 1.0)
        made.append(ScoredQuestion(both[0], Words((found,), 12), evidence, tokens=5))

    def loss(weight: float) -> float:
        """The smallest loss of any temperature."""
        totals = [(q.states + weight * q.words.scores, q.evidence) for q in made]
        return min(
            float(sum(-(t / heat).log_softmax(0)[gold].sum() for t, gold in totals))
            for heat in ((1 + weight) * share for share in (0.03, 0.1, 0.2, 0.3, 0.5, 1))
        )

    weight = fit_word_weight(made)
    assert loss(weight) <= 0.5 + min(loss(weight / 3), loss(weight * 3))
    assert words / max(states, 0.1) / 3 <= weight <= 3 * max(words, 0.1) / max(states, 0.01)


def test_spans_are_fitted_to_the_first_questions_and_measured_on_the_last(
    model: SeDeM, examples: ExampleSet
) -> None:
    chosen = repeated(examples, 20)
    model.second_reading = SecondReading()
    compared = compare_spans(model, chosen, read_examples(model, chosen))
    assert len(compared) == 20
    for memory, text in compared:
        assert memory is not None and memory.features.shape == (
            len(memory.right),
            len(SPAN_FEATURES),
        )
        assert text is not None and text.features.shape == (len(text.right), len(SECOND_FEATURES))
        for right in (memory.right, text.right):
            assert float(right.min()) >= 0 and float(right.max()) <= 1
    found = calibrate(model, chosen, answer="span")
    assert found.settings == {
        "selection": "both", "word_weight": found.settings["word_weight"], "confidence": True,
        "answer": "span", "spans": True,
        "second_reading": "second_reading" in found.parts,
        "min_confidence": found.settings["min_confidence"],
    }  # fmt: skip
    # The model selects by words too once it was calibrated, and has the fitted score of spans.
    both = compare_spans(model, chosen, read_examples(model, chosen))
    expected = SpanScorer()
    compared = [memory for memory, _ in both if memory is not None]
    expected.fit([(one.features, one.right) for one in compared[:15] if one.right.any()])
    torch.testing.assert_close(found.parts["spans"].weight, expected.weight)
    measured = compared[15:]
    best = [float(one.right[expected(one.features).argmax()]) for one in measured]
    assert found.f1["span"] == pytest.approx(100 * mean(best))
    assert found.f1["free"] == pytest.approx(100 * mean(one.free for one in measured))
    assert found.to_dict()["f1"] == {how: round(f1, 2) for how, f1 in found.f1.items()}


def test_a_recipe_keeps_questions_for_calibration(
    stage2_recipe: Stage2Recipe,
) -> None:
    with pytest.raises(ConfigError, match=r"has no data.calibration"):
        recipe_examples(stage2_recipe, 10, 0)
    sources = [DataSource(path="squad.json", records=one) for one in (":1", "1:2")]
    kept = stage2_recipe.data.with_changes(calibration=tuple(sources))
    recipe = stage2_recipe.with_changes(data=kept)
    sets = [
        sample(open_examples(Path(recipe.data_root) / "squad.json", records=one).examples, 4, 0)
        for one in (":1", "1:2")
    ]
    found = recipe_examples(recipe, 4, 0)
    assert [e.id for e in found] == [e.id for one in sets for e in one[:3]] + [
        e.id for one in sets for e in one[3:]
    ]
