"""One form for a word, a number or a code, however it is written."""

from __future__ import annotations

import pytest

from sedem.folding import asked_words, folded, shown, terms_of, words_of


def words(text: str) -> list[str]:
    return [text[start:end] for start, end in words_of(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The pie keeps, e.g. 3 days.", ["The", "pie", "keeps", "e", "g", "3", "days"]),
        ("1,385.50 at 10:30", ["1,385.50", "at", "10:30"]),
        ("£1.5million or \u221240 °C", ["£1.5million", "or", "\u221240", "C"]),
        ("in 2015-16, pp. 3\u20134", ["in", "2015", "-16", "pp", "3", "4"]),
        ("B12 and the 16th", ["B12", "and", "the", "16th"]),
        ("Ágnes Hörömpöly-Szabó's", ["Ágnes", "Hörömpöly", "Szabó", "s"]),
        ("snake_case", ["snake", "case"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("e\u0301te\u0301", ["e\u0301te\u0301"]),
        ("東京タワー", ["東", "京", "タ", "ワ", "ー"]),
        ("ที่นี่", ["ที่", "นี่"]),
        ("Lind\u00adgren\u00adstrasse", ["Lind\u00adgren\u00adstrasse"]),
        ("per\u200bmit-\n ted", ["per\u200bmit-\n ted"]),
        ("1\u202f240 or 2'000.50", ["1\u202f240", "or", "2'000.50"]),
        ("...!?", []),
        ("", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    "forms",
    [
        ("Zo\u00eb", "Zoe\u0308", "ZOE"),
        (
            "office",
            "of\ufb01ce",
            "\uff2f\uff46\uff46\uff49\uff43\uff45",
            "of\u00adfice",
            "of\u200bfice",
        ),
        ("Stra\u00dfe", "STRASSE", "stra\u1e9ee"),
        ("\u0141\u00f3d\u017a", "lodz"),
        ("\u00d8rsted", "orsted"),
        ("\u03a3\u0391\u03a3", "\u03c3\u03b1\u03c2"),
        ("\u0639\u0650\u0644\u0645", "\u0639\u0644\u0645", "\ufecb\ufee0\ufee2"),
        ("\u0915\u093c\u0932\u092e", "\u0958\u0932\u092e"),
        ("\u30ab\u3099\u30b9", "\u30ac\u30b9", "\uff76\uff9e\uff7d"),
        ("1,240", "1240", "1.240", "1'240", "1\u202f240", "01240", "\u0967\u0968\u096a\u0966"),
        ("7,350.50", "7350,50", "7.350,50", "7350.5"),
        ("12.00", "12"),
    ],
)
def test_forms_of_a_word_are_one(forms: tuple[str, ...]) -> None:
    assert len({folded(form) for form in forms}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [("1240", "1,241"), ("1.24", "124"), ("12.5", "125"),
     ("\u0e2b\u0e49\u0e2d\u0e07", "\u0e2b\u0e2d\u0e07"),
     ("\u0939\u093f", "\u0939\u0941"), ("rent", "rant")],
)  # fmt: skip
def test_other_words_stay_others(one: str, other: str) -> None:
    assert folded(one) != folded(other)


@pytest.mark.parametrize(
    "forms",
    [
        ("1240", "1 240", "1,240"),
        ("DE89 3704 0044 0532 0130 00", "DE89370400440532013000", "DE89-3704-0044-0532-0130-00"),
        ("030 1234567", "0301234567", "(030) 123 45 67", "030/1234-567"),
        ("HK-2093", "HK2093", "HK\u20112093", "HK_2093"),
        ("AB-0042", "AB42", "AB-42"),
        ("e-mail", "email", "e\u2010mail"),
        ("3175kg", "3,175 kg", "3175 kg"),
    ],
)
def test_numbers_and_codes_meet_in_any_form(forms: tuple[str, ...]) -> None:
    for asked in forms:
        for text in forms:
            has = f" {folded(text)} "
            found = [any(f" {key} " in has for key in one.keys) for one in asked_words(asked)]
            assert any(found), (asked, text)
            if len(found) == 1:
                assert all(found)


def test_parts_stand_in_only_for_a_number_that_is_nowhere() -> None:
    (one,) = asked_words("22 04")
    assert one.keys == ("22 4", "2204") and one.otherwise is not None
    assert [part.keys for part in one.otherwise] == [("22",), ("4",)]


def test_each_word_of_a_question_counts_once() -> None:
    asked = asked_words('A rent, a "Rent" AND under_score 5%')
    assert [one.text for one in asked] == ["A", "rent", "AND", "under", "score", "5"]


def test_scripts_without_spaces_are_pairs_of_letters_with_their_marks() -> None:
    assert (
        folded("\u0e43\u0e2b\u0e49\u0e40\u0e0a\u0e48\u0e32 3")
        == "\u0e43\u0e2b\u0e49 \u0e2b\u0e49\u0e40 \u0e40\u0e0a\u0e48 \u0e0a\u0e48\u0e32 3"
    )


def test_places_count_the_text_as_it_is() -> None:
    text = "The of\ufb01ce in Lind\u00adgren\u00adstrasse costs 1 240 euros."
    places = {term.key: text[term.start : term.end] for term in terms_of(text)}
    assert places["office"] == "of\ufb01ce" and places["1240"] == "1 240"
    assert shown(places["lindgrenstrasse"]) == "Lindgrenstrasse"
