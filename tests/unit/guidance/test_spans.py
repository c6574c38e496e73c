"""Where spans may begin and end, and the numbers by which they are compared."""

from __future__ import annotations

import math
import re

import pytest
import torch

from sedem.folding import words_of
from sedem.guidance.spans import (
    FEATURES,
    GAP,
    LEAST,
    SECOND_FEATURES,
    SecondReading,
    SpanScorer,
    borders_of,
    matches_of,
    same_stem,
    second_features,
    span_features,
    unsupported,
    with_range,
)


def test_a_span_ends_after_a_word_and_after_signs_that_belong_to_it() -> None:
    text = "about 7 % (or 8%) of it"
    ends = {text[:end] for end in borders_of(text, words_of(text))[1]}
    assert {"about 7", "about 7 % (or 8", "about 7 % (or 8%)"} < ends
    assert not any(one.endswith(" ") for one in ends)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("Write to dbus-security@lists.example.org, please.", "dbus-security@lists.example.org"),
        ("It is at https://example.org/a_b/c-d?e=1. There.", "https://example.org/a_b/c-d?e=1"),
        ("See (www.example.org/roses).", "www.example.org/roses"),
        ('Item: Spare tube 20" | Qty: 4', '20"'),
        ("A pipe of 1.5\u2033 fits.", "1.5\u2033"),
        # Codes and dates.
        ("The lamp is V-77, and new.", "V-77"),
        ("Shipment HK-2093 left.", "HK-2093"),
        ("It runs R2-60-70 now.", "R2-60-70"),
        ("Two F-16s flew.", "F-16s"),
        ("A COVID-19-related loss", "COVID-19"),
        ("Tel. 030/1234-56", "030/1234-56"),
        ("checked on 2026-11-29 by", "2026-11-29"),
        ("on 03/04/2024.", "03/04/2024"),
        # Ranges with a sign.
        ("A bag of 60-70 seeds.", "60-70"),
        ("from 10.30\u201312.00 in the hall", "10.30\u201312.00"),
        ("in season 1998/99", "1998/99"),
        ("the years 2008\u20132012", "2008\u20132012"),
        ("a loan at 3%\u20135%.", "3%\u20135%"),
        ("They cost $45-$52 each", "$45-$52"),
        ("kostet 45 \u20ac \u2013 52 \u20ac im Jahr", "45 \u20ac \u2013 52 \u20ac"),
        ("pages 12 - 15", "12 - 15"),
        ("open 9am-5pm", "9am-5pm"),
        ("1.200\u20131.500 Euro", "1.200\u20131.500"),
    ],
)
def test_what_is_written_as_one_is_not_divided(text: str, whole: str) -> None:
    begins, ends = borders_of(text, words_of(text))
    start = text.index(whole)
    end = start + len(whole)
    assert [first for first, _ in begins if start <= first < end] == [start]
    assert [one for one in ends if start < one <= end] == [end]


@pytest.mark.parametrize(
    "whole",
    [
        "from 45 to 52",
        "from 45 euros to 52",
        "from $9 million to $350",
        "from \u22125 to \u221212 \u00b0C",
        "from 10 a.m. to 4",
        "from 4.5% down to 3%",
        "from 1200 to 1300",
        "between 3 and 5",
        "von 45 auf 52",
        "von 13 bis 15",
        "vom 3. bis 5",
        "zwischen 80 und 120",
        "de 45 \u00e0 52",
        "entre 3 et 5",
        "de 1 200 \u00e0 1 300",
        "desde 45 hasta 52",
        "entre 3 y 5",
        "del 3 al 5",
        "da 45 a 52",
        "tra 3 e 5",
        "dalle 9 alle 12",
        "60 to 70",
        "9:00 bis 12:30",
        "3 \u00e0 5",
        "3 a 5",
    ],
)
def test_the_answer_shows_the_whole_range_of_a_number(whole: str) -> None:
    text = f"x {whole} y"
    numbers = [found.span() for found in re.finditer(r"\d[\d.]*", text)]
    for at, end in (numbers[0], numbers[-1], (2, numbers[0][1])):
        assert text[slice(*with_range(text, at, end))] == whole
    at, end = with_range(text, numbers[-1][0], len(text))
    assert text[at:end] == f"{whole} y"
    assert with_range(text, 0, 1) == (0, 1)


@pytest.mark.parametrize(
    ("text", "apart"),
    [
        ("a 10-acre farm", "10"),
        ("a 10-acre farm", "acre"),
        ("in the mid-1990s", "1990s"),
        ("from 1914 to 1918", "1914"),
        ("from 1914 to 1918", "1918"),
        ("rooms 389 to 950, and", "950"),
        ("from Ardle to 52 Quay Street", "52"),
        ("12 and 15", "12"),
    ],
)
def test_what_only_looks_alike_is_divided(text: str, apart: str) -> None:
    begins, ends = borders_of(text, words_of(text))
    assert text.index(apart) in {first for first, _ in begins}
    assert text.index(apart) + len(apart) in ends
    place = text.index(apart), text.index(apart) + len(apart)
    assert with_range(text, *place) == place


def test_a_sign_that_closes_a_quotation_is_none_of_inches() -> None:
    text = 'He said "it was 20" and left. A tube of 20" was'
    _, ends = borders_of(text, words_of(text))
    assert text.index("20") + 2 in ends
    assert text.rindex("20") + 2 not in ends


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("mayor", "mayor", True),
        ("mayor", "mayors", True),
        ("founded", "founding", True),
        ("kings", "king", True),
        ("on", "one", False),
        ("rent", "tent", False),
        ("national", "nations", True),
        ("form", "formality", False),
        ("20155", "20156", False),
    ],
)
def test_forms_of_a_word(first: str, second: str, same: bool) -> None:
    assert same_stem(first, second) == same_stem(second, first) == same


def test_matches_are_the_words_of_the_question() -> None:
    text = "The mayors of Rome. MAYOR and rent."
    found = matches_of(text, {"Mayor": 3.0, "rent": 1.5, "absent": 9.0})
    assert [(text[m.start : m.end], m.word) for m in found] == [
        ("mayors", "Mayor"), ("MAYOR", "Mayor"), ("rent", "rent"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "text", "expected"),
    [
        ("HK-2093", "HK2093, HK 2093, hk-2093, 2093", ["HK2093", "HK 2093", "hk-2093"]),
        ("1,240", "1240 or 1 240 or 1.240 but not 1, 240", ["1240", "1 240", "1.240"]),
        ("0042", "number 42 and 420", ["42"]),
        ("22 04", "22-04, 22 and 04", ["22-04"]),
        ("租赁", "该租赁合同", ["租赁"]),
    ],
)
def test_a_number_or_code_is_found_whole(word: str, text: str, expected: list[str]) -> None:
    found = matches_of(text, {word: 1.0})
    assert list(dict.fromkeys(text[m.start : m.end] for m in found)) == expected


def test_features_of_a_span() -> None:
    columns = [[-3.0], [2.0], [-0.5], [0.75]]
    (row,) = span_features(*map(torch.tensor, columns)).tolist()
    expected = [-3.0, -1.0, math.log(2.0), -0.5, 0.75]
    assert dict(zip(FEATURES, row, strict=True)) == pytest.approx(
        dict(zip(FEATURES, expected, strict=True))
    )


def test_before_it_is_fitted_the_scorer_compares_probabilities() -> None:
    features_SF = torch.randn(5, len(FEATURES), generator=torch.manual_seed(0))
    assert torch.equal(SpanScorer()(features_SF), features_SF[:, 0])


def test_fitting_finds_the_feature_that_tells_right_spans() -> None:
    generator = torch.manual_seed(0)
    questions = []
    for _ in range(40):
        features_SF = torch.randn(6, len(FEATURES), generator=generator)
        right_S = (features_SF[:, 4] == features_SF[:, 4].max()).float()
        questions.append((features_SF, right_S))
    scorer = SpanScorer()
    scorer.fit(questions)
    weight_F = scorer.weight.detach().abs()
    assert int(weight_F.argmax()) == 4 and weight_F.topk(2).values[1] < 0.3 * weight_F.max()
    chosen = [int(scorer(f).argmax()) == int(r.argmax()) for f, r in questions]
    assert sum(chosen) >= 38


@pytest.mark.parametrize("sign", [-1.0, -0.3, 1.0])
def test_a_lower_score_of_its_block_never_speaks_for_a_span(sign: float) -> None:
    generator, block = torch.manual_seed(0), FEATURES.index("block")
    questions = []
    for _ in range(40):
        features_SF = torch.randn(6, len(FEATURES), generator=generator)
        seen_S = features_SF[:, 4] + sign * features_SF[:, block]
        questions.append((features_SF, (seen_S == seen_S.max()).float()))
    scorer = SpanScorer()
    scorer.fit(questions)
    weight_F = scorer.weight.detach()
    assert weight_F[4] > 0
    assert weight_F[block] == 0 if sign < 0 else weight_F[block] > 0


def test_the_gap_is_the_one_with_which_answers_are_best() -> None:
    scorer = SpanScorer()
    assert scorer.gap.item() == GAP
    gaps = [0.1 * n for n in range(100)]
    near = [gap < 5 for gap in gaps]
    scorer.fit_gap(gaps, spans=[float(one) for one in near], free=[float(not one) for one in near])
    assert 4.8 <= scorer.gap.item() <= 5.0
    # Between 2 and 8 both answers are alike, so any of these gaps would do.
    spans, free = [float(gap < 8) for gap in gaps], [float(gap > 2) for gap in gaps]
    scorer.fit_gap(gaps, spans, free)
    assert 4.8 <= scorer.gap.item() <= 5.2
    scorer.fit_gap(gaps, spans=[1.0] * 100, free=[0.0] * 100)
    assert scorer.gap.item() > 9.7


def test_the_best_span_comes_with_its_share_and_its_mean_probability() -> None:
    features_SF = torch.tensor([[-4.0, -2.0, 0.0, 0.0, 1.0], [-1.0, -0.5, 0.0, 0.0, 0.0]])
    best, features = SpanScorer().best(features_SF)
    share = math.exp(-1.0) / (math.exp(-1.0) + math.exp(-4.0))
    assert best == 1
    assert features.tolist() == pytest.approx([math.log(share), -0.5])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Piet van der Wouden", ()),
        ("Piet van der Woudoud", ("Woudoud",)),
        ("1,358 euros", ("1,358", "euros")),
        ("1,385 crown", ()),
        ("no", ()),
        ("Yes", ()),
        ("Ann and Ann", ("Ann",)),
        ("He called in 2015", ("He", "2015")),
        ("1385 crowns", ()),
        ("1 385 crowns", ()),
        ("PIET van-der-Wouden", ()),
    ],
)
def test_words_that_no_source_has(answer: str, expected: tuple[str, ...]) -> None:
    sources = ["Call Piet van der Wouden.", "It costs 1,385 crowns."]
    assert unsupported(answer, sources) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Novak Olsen", ("Novak Olsen",)),
        ("Ida Olsen and Martin Novak", ()),
        ("The Martin Novak", ()),
        ("12 March 2024", ()),
        ("22 March 1984", ("22", "March 1984")),
        ("12 March 1984 Novak", ("12 March 1984 Novak",)),
        ("George Eastman", ()),
        ("Ida Novak, Olsen", ("Ida Novak",)),
        ("1984 12 Ida", ("1984 12 Ida",)),
    ],
)
def test_names_and_numbers_stand_in_a_source_as_a_whole(
    answer: str, expected: tuple[str, ...]
) -> None:
    sources = [
        "The landlord is Martin Novak. The tenant is Ida Olsen, born in 1984.",
        "Signed in March; the rent begins on March 12, 2024",
        "Eastman, George",
    ]
    assert unsupported(answer, sources) == expected


def test_a_span_that_memory_has_not_read_counts_as_its_least_likely() -> None:
    features_SF = span_features(
        torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1.0, 3.0, 2.0]), *torch.zeros(2, 3)
    )
    memory_S = torch.tensor([-1.0, -8.0, torch.nan])
    found = second_features(features_SF, torch.tensor([0.0, 1.0, 2.0]), memory_S)
    assert found.shape == (3, len(SECOND_FEATURES))
    assert torch.equal(found[:, : len(FEATURES)], features_SF)
    expected = [[0.0, -1.0, -0.5], [1.0, -8.0, -2.0], [2.0, -6.0, -2.0]]
    torch.testing.assert_close(found[:, len(FEATURES) :], torch.tensor(expected))
    nothing = second_features(features_SF[:1], torch.zeros(1), torch.tensor([torch.nan]))
    torch.testing.assert_close(nothing[0, -2:], torch.tensor([2 * LEAST, LEAST]))


def test_memory_alone_is_believed_from_the_share_where_text_gains_nothing() -> None:
    shares = [0.1, 0.3, 0.5, 0.7, 0.9]
    for memory, text, expected in (
        ([0.0, 0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0], 0.5),
        ([1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0, 1.0], 0.1),
        ([1.0, 1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0], 1.0),
        # What memory loses in the middle is more than it wins below.
        ([1.0, 0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0, 1.0], 0.7),
        ([1.0, 1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0, 1.0], 0.1),
    ):
        second = SecondReading()
        second.fit_sure(shares, memory, text)
        assert second.sure.item() == pytest.approx(expected)
