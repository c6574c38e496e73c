"""Training queries from the decoder's states, for a selector whose keys stay."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest
import torch
from answers import RENT, opened
from unit.training.blocks import BLOCKS, HEADS, WIDTH, asked, repeated

from sedem import Document, SeDeM, SedemConfig
from sedem.checkpoint.folder import copy_with_parts
from sedem.guidance import Queries
from sedem.method.selector import Selector, block_scores
from sedem_lab.data.examples import ExampleSet
from sedem_lab.training.calibration import calibrate, query_questions, read_examples
from sedem_lab.training.queries import QueryQuestion, fit_queries


def made(count: int, turned: torch.Tensor, selector: Selector, seed: int) -> list[QueryQuestion]:
    """Questions with evidence in a block whose key is the turned states of the question."""
    generator = torch.Generator().manual_seed(seed)
    questions = []
    for _ in range(count):
        hidden_QE, keys_NJRH = asked(turned, selector, generator)
        slots_NJ = torch.ones(BLOCKS, 3, dtype=torch.bool)
        blocks_N = torch.randperm(BLOCKS, generator=generator)
        questions.append(QueryQuestion(hidden_QE, blocks_N, blocks_N == 4, keys_NJRH, slots_NJ))
    return questions


def scores(part: Queries, selector: Selector, one: QueryQuestion) -> torch.Tensor:
    """Of all blocks."""
    query_1QRH, mask_1Q = part.queries(selector, one.hidden[None]), torch.ones(1, 3) > 0
    return block_scores(query_1QRH, mask_1Q, one.keys[None], one.slots[None])[0]


def found(part: Queries, selector: Selector, questions: list[QueryQuestion]) -> float:
    return mean(int(scores(part, selector, one).argmax()) == 4 for one in questions)


def test_it_learns_to_select_by_other_states() -> None:
    torch.manual_seed(0)
    selector = Selector(HEADS * WIDTH, HEADS * WIDTH, HEADS, WIDTH).requires_grad_(False)
    own = selector.w_query.weight
    turned = own + 3 * own.std() * torch.randn(len(own), 2) @ torch.randn(2, own.shape[1])
    questions = made(60, turned, selector, 1)
    untrained = found(Queries(selector, 32), selector, questions)
    part = fit_queries(selector, made(600, turned, selector, 0))
    assert not any(parameter.requires_grad for parameter in part.parameters())
    assert found(part, selector, questions) > max(0.9, untrained + 0.1)


def test_the_loss_is_info_nce_over_the_blocks_of_the_question() -> None:
    selector = Selector(HEADS * WIDTH, HEADS * WIDTH, HEADS, WIDTH).requires_grad_(False)
    [question] = made(1, torch.eye(HEADS * WIDTH), selector, 3)
    question = replace(question, blocks=torch.tensor([4, 1, 3]), evidence=torch.arange(3) < 2)
    part = Queries(selector, 32).requires_grad_(False)
    share_N = (scores(part, selector, question)[[4, 1, 3]] / (0.07 * 3)).softmax(0)
    expected = -(share_N[0].log() + share_N[1].log()) / 2
    torch.testing.assert_close(question.loss(part, selector), expected)


def test_calibration_lets_a_model_read_questions_once(
    config: SedemConfig, examples: ExampleSet, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = config.with_changes(block_context="independent", guidance=True)
    model = opened(config, "static")
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder / "before")
    chosen = repeated(examples, 20)
    model = SeDeM.from_pretrained(folder / "before")
    fitted = calibrate(model, chosen, answer="free", read_once=chosen)
    assert fitted.settings["read_once"]
    copy_with_parts(folder / "before", folder / "after", fitted.parts, **fitted.settings)
    again = SeDeM.from_pretrained(folder / "after", dtype=torch.float32)
    assert again.read_once is not None and again.config.read_once
    questions = query_questions(again, chosen, read_examples(again, chosen))
    assert len(questions) == 20 and all(one.evidence.any() for one in questions)
    bank = again.read([Document("a.txt", "The rent is 900 euros.")])
    once = again.scores(bank, RENT)
    again.read_once, again.config = None, again.config.with_changes(read_once=False)
    assert not torch.equal(again.scores(bank, RENT), once)
