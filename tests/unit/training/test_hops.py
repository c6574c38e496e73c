"""Training the second hop on questions whose next block only the first one leads to."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest
import torch
from unit.training.blocks import BLOCKS, HEADS, WIDTH, asked, repeated

from sedem import SeDeM
from sedem.guidance import SecondHop
from sedem.method.selector import Selector
from sedem_lab.data.examples import Evidence, ExampleSet
from sedem_lab.training.calibration import (
    calibrate,
    hop_questions,
    read_examples,
    samples,
)
from sedem_lab.training.hops import HopQuestion, all_found, fit_second_hop
from sedem_lab.training.recipe import DataSource
from sedem_lab.training.stages import Stage2Recipe


def made(count: int, turned: torch.Tensor, selector: Selector, seed: int) -> list[HopQuestion]:
    """Questions whose next block has the turned states of the question as its key."""
    generator = torch.Generator().manual_seed(seed)
    questions = []
    for number in range(count):
        hidden_QE, keys_NJRH = asked(turned, selector, generator)
        one_step = number % 3 == 0
        left_N = torch.zeros(BLOCKS, dtype=torch.bool)
        left_N[4] = not one_step
        scores_N = torch.arange(BLOCKS, 0, -1).float()
        questions.append(
            HopQuestion(
                hidden_QE,
                keys_NJRH,
                torch.ones(BLOCKS, 3, dtype=torch.bool),
                scores_N,
                torch.zeros(BLOCKS),
                torch.zeros(BLOCKS),
                scores_N,
                0,
                left_N,
                torch.arange(BLOCKS),
                frozenset({0} if one_step else {0, 4}),
                torch.tensor([1.0 if one_step else 0.2, 1.0, 0.5]),
            )
        )
    return questions


def test_it_learns_which_block_the_question_leads_to_and_when_one_is_enough() -> None:
    torch.manual_seed(0)
    selector = Selector(HEADS * WIDTH, HEADS * WIDTH, HEADS, WIDTH).requires_grad_(False)
    own = selector.w_query.weight
    turned = own + 3 * own.std() * torch.randn(len(own), 2) @ torch.randn(2, own.shape[1])
    questions = made(60, turned, selector, 1)
    assert mean(all_found(SecondHop(selector), selector, questions, 2)["2"]) < 0.7
    part = fit_second_hop(selector, made(900, turned, selector, 0))
    assert not any(parameter.requires_grad for parameter in part.parameters())
    found = all_found(part, selector, questions, 2)
    assert mean(found["1"]) == pytest.approx(1 / 3)
    assert mean(found["2"]) > 0.8 and mean(found["auto"]) > 0.8


def test_what_the_questions_are_taken_from_does_not_decide_whether_one_needs_a_second_hop() -> None:
    selector = Selector(HEADS * WIDTH, HEADS * WIDTH, HEADS, WIDTH).requires_grad_(False)
    questions = made(90, torch.eye(HEADS * WIDTH), selector, 4)
    alike = [replace(one, features=torch.tensor([0.5, 1.0, 0.5])) for one in questions]
    part = fit_second_hop(selector, alike)
    assert float(part.open(alike[0].features)) == pytest.approx(0.5, abs=1e-3)


def test_the_loss_is_that_of_one_of_the_blocks_being_next(model: SeDeM) -> None:
    selector = Selector(HEADS * WIDTH, HEADS * WIDTH, HEADS, WIDTH).requires_grad_(False)
    [question] = made(2, torch.eye(HEADS * WIDTH), selector, 3)[1:]
    question = replace(question, left=torch.tensor([False, True, False, False, True, False]))
    part = SecondHop(selector).requires_grad_(False)
    logits_N = question.scores(part, selector)[1:] / (0.015 * 3)
    share_N = logits_N.exp() / logits_N.exp().sum()
    expected = -torch.log(share_N[0] + share_N[3])
    torch.testing.assert_close(question.loss(part, selector), expected)


def test_calibration_trains_a_second_hop(model: SeDeM, examples: ExampleSet) -> None:
    chosen = repeated(examples, 20)
    both = [replace(one, evidence=tuple(Evidence(n, 0, 5) for n in range(2))) for one in chosen[:6]]
    questions = hop_questions(model, both, read_examples(model, both))
    assert len(questions) == 6
    for one in questions:
        assert one.evidence == {0, 1} and bool(one.left.any()) and not one.left[one.first]
        assert int(one.total.argmax()) == one.first
    found = calibrate(model, [*chosen, *both], answer="free", two_steps=both, hops="auto")
    assert found.settings["second_hop"] and found.settings["hops"] == "auto"
    assert set(found.all_found) == {"1", "2", "auto"}
    assert found.to_dict()["all_found"] == {k: round(v, 4) for k, v in found.all_found.items()}


def test_a_recipe_names_the_questions_of_the_second_hop(stage2_recipe: Stage2Recipe) -> None:
    assert [*samples(stage2_recipe, stage2_recipe.data.hops, 10, 0)] == []
    assert next(samples(stage2_recipe, [DataSource(path="squad.json")], 3, 0))
