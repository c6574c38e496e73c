from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.config import Segmentation
from sedem.errors import DataError
from sedem.method.segments import Segments, boundaries, paragraphs, segment_text, sentences_of

TEXTS = st.text(
    alphabet=st.one_of(
        st.sampled_from("ab \n\t.éß€🥧\r\u2028\x1c\u0301"), st.characters(codec="utf-8")
    ),
    max_size=60,
)


@pytest.fixture(scope="module")
def reader(tiny_folder: Callable[..., str]) -> Backbone:
    return open_backbone(tiny_folder())


def spans(segments: Segments) -> list[tuple[int, int]]:
    """First and last character of each segment, from its first and last real token."""
    return [
        (int(segments.starts[row, 0]), int(segments.ends[row, int(length) - 1]))
        for row, length in enumerate(segments.lengths)
    ]


def pieces(segments: Segments, text: str) -> list[str]:
    return [text[start:end] for start, end in spans(segments)]


def uncovered(segments: Segments, text: str) -> list[int]:
    covered: set[int] = set()
    for row, length in enumerate(segments.lengths.tolist()):
        for token in range(length):
            start, end = int(segments.starts[row, token]), int(segments.ends[row, token])
            covered |= set(range(start, end))
    return sorted(set(range(len(text))) - covered)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 20])
def test_windows_hold_t_tokens_each_and_the_last_one_the_rest(reader: Backbone, size: int) -> None:
    text = "abcdefghijklmnopqrst"[:size]
    segments = segment_text(text, reader, 8, "window")
    assert len(segments) == -(-size // 8)
    assert segments.lengths.tolist() == [min(8, size - at) for at in range(0, size, 8)]
    assert segments.ids[segments.mask].tolist() == reader.token_ids(text)
    assert pieces(segments, text) == [text[at : at + 8] for at in range(0, size, 8)]


@pytest.mark.parametrize(
    ("size", "shift", "expected"),
    [
        (18, 3, ["abcde", "fghijklm", "nopqr"]),  # three of six free places are used
        (18, 6, ["ab", "cdefghij", "klmnopqr"]),
        (18, 7, ["ab", "cdefghij", "klmnopqr"]),  # only six are free
        (15, 3, ["abcdefg", "hijklmno"]),
        (16, 3, ["abcdefgh", "ijklmnop"]),  # none is free
        (5, 3, ["abcde"]),  # there is no boundary
    ],
)
def test_a_shift_moves_every_boundary_as_far_as_the_last_segment_has_room(
    reader: Backbone, size: int, shift: int, expected: list[str]
) -> None:
    text = "abcdefghijklmnopqr"[:size]
    segments = segment_text(text, reader, 8, "window", shift)
    assert pieces(segments, text) == expected
    assert segments.ids[segments.mask].tolist() == reader.token_ids(text)


@given(tokens=st.integers(1, 60), length=st.integers(1, 9), data=st.data())
def test_a_shift_keeps_the_number_of_segments_and_every_token(
    tokens: int, length: int, data: st.DataObject
) -> None:
    shift = data.draw(st.integers(0, length - 1))
    before, after = boundaries(tokens, length), boundaries(tokens, length, shift)
    assert (after[0], after[-1], len(after)) == (0, tokens, len(before))
    assert all(0 < stop - first <= length for first, stop in pairwise(after))
    free = 0
    while (tokens + free) % length:
        free += 1
    moves = [old - new for old, new in zip(before[1:-1], after[1:-1], strict=True)]
    assert moves == [min(shift, free)] * len(moves)


def test_the_mask_is_false_where_a_short_segment_is_padded(reader: Backbone) -> None:
    segments = segment_text("abcdefghij", reader, 8, "window")
    assert segments.mask.tolist() == [[True] * 8, [True] * 2 + [False] * 6]
    assert segments.ids[1, 2:].tolist() == [0] * 6


def test_a_paragraph_starts_a_segment_and_a_long_one_is_cut(reader: Backbone) -> None:
    text = "first\n\nsecond paragraph\n \n\nthird"
    segments = segment_text(text, reader, 8, "paragraph")
    assert pieces(segments, text) == ["first", "second p", "aragraph", "third"]
    assert segments.lengths.tolist() == [5, 8, 8, 5]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The last place in the second half of a window: a paragraph before a sentence, and so on.
        ("aa. B\n\nC. Dd ee", ["aa. B\n\n", "C. Dd ee"]),
        ("aaaa bb. C d e f", ["aaaa bb. ", "C d e f"]),
        ("aaaa. B\ncc dd ee", ["aaaa. ", "B\ncc dd ee"]),
        ("aaaa b\ncc dd ee", ["aaaa b\n", "cc dd ee"]),
        ("aaaa bb cc dd", ["aaaa bb cc", " dd"]),
        ("abcdefghijklmnopqr", ["abcdefghij", "klmnopqr"]),
        # A full stop in the first half, after an initial or a title, or before a small letter.
        ("A. Bb ccc ddd", ["A. Bb ccc ", "ddd"]),
        ("aaaa J. Bo cc d", ["aaaa J. Bo", " cc d"]),
        ("aaaa Dr. Bo cc d", ["aaaa Dr. ", "Bo cc d"]),
        ("aaaa i.e. b cc d", ["aaaa i.e. ", "b cc d"]),
        ("a b. | c d\ne f | g", ["a b. | c d", "\ne f | g"]),
        ("aa | b. C\ndd | e", ["aa | b. C\n", "dd | e"]),
        ("\u4e00\u4e01\u3002\u4e02\u4e03", ["\u4e00\u4e01\u3002", "\u4e02\u4e03"]),
        ("\u4e00\u4e01\u4e02\u4e03", ["\u4e00\u4e01\u4e02", "\u4e03"]),
        ("\u4e00\u4e01V-77\u4e02", ["\u4e00\u4e01V-77", "\u4e02"]),
        ("\u4e00\u4e01a V-77", ["\u4e00\u4e01a ", "V-77"]),
        ("\u4e00\u4e01\uff0cV-77", ["\u4e00\u4e01\uff0c", "V-77"]),
    ],
)
def test_a_segment_ends_where_the_text_does(
    reader: Backbone, text: str, expected: list[str]
) -> None:
    segments = segment_text(text, reader, 10, "sentence")
    assert pieces(segments, text) == expected
    assert segments.ids[segments.mask].tolist() == reader.token_ids(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The lamp is V-77, and new.", ["The lamp is V-77,", "V-77, and new."]),
        ("Ask me at a@b.org. Bye", ["Ask me at a@b.org.", "a@b.org. Bye"]),
        ("It was on 9/11/29", ["It was on 9/11/29", "9/11/29"]),
        ("The bank asks 3.5% a year", ["The bank asks 3.5%", "3.5% a year"]),
        ("One two three 60-70 seeds", ["One two three 60-70", "60-70 seeds"]),
        ("We were in a ship\nment of tea", ["We were in a ship", "ship\nment of tea"]),
        ("We were at a café bar", ["We were at a café", "café bar"]),
        # A cut between words stays, and one in a word that is longer than half a window.
        ("The lamp is new. And old", ["The lamp is new.", " And old"]),
        ("See x.org/a/b/c/d/e/f", ["See x.org/a/b/c/", "d/e/f"]),
        # A script without spaces is cut anywhere, but not a code in it.
        ("一丁丂七丄丅", ["一丁丂七丄丅", "丅"]),
        ("一丁丂七\uff0cV-77一", ["一丁丂七\uff0cV-77", "V-77一"]),
        # The row of a table stays whole.
        ("A: 1 | B: 2\nA: 3 | B: 4", ["A: 1 | B: 2\n", "A: 3 | B: 4"]),
    ],
)
def test_a_word_that_is_cut_belongs_to_both_segments(
    reader: Backbone, text: str, expected: list[str]
) -> None:
    segments = segment_text(text, reader, 16, "window", whole_words=True)
    assert pieces(segments, text) == expected
    assert torch.equal(segments.ids, segment_text(text, reader, 16, "window").ids)


def test_sentences_begin_after_their_end_and_on_new_lines() -> None:
    text = (
        'He came. "Why?" she said. Mr. T. Bell, vs. no one\n'
        "Rent: 900 \u884c\u3067\u3059\u3002\u6b21\u3002Due 3.5 e.g. in May"
    )
    found = sentences_of(text)
    assert [text[a:b] for a, b in pairwise(found)] == [
        "He came. ",
        '"Why?" she said. ',
        "Mr. T. Bell, vs. no one\n",
        "Rent: 900 \u884c\u3067\u3059\u3002",
        "\u6b21\u3002",
        "Due 3.5 e.g. in May",
    ]


@pytest.mark.parametrize(
    "sentences",
    [
        # A lease, a letter with a name after the wrap, and German.
        ["It may be ended by either side with three\nmonths' notice, in writing. ", "No dogs."],
        [
            "This agreement is made on 14 March 2024 between Margit Olsen, of 9\n"
            "Quay Street, Ardle, and the tenants. ",
            "They pay.",
        ],
        ["Die Tonnen werden dienstags um sieben Uhr\nüber den Hof gebracht. ", "Danke."],
        # Lists, labels, rows, short lines and ends of sentences stay apart.
        ["milk and eggs\n", "flour for the bread\n", "salt"],
        [
            "The quick brown fox jumps over the lazy dog and does not come back\n",
            "- one\n",
            "- two",
        ],
        ["Name: Ida Olsen, who lives in the house at the end of the long street\n", "Rent: 900"],
        [
            "Item: Spare tube | Qty: 4 | Price: 6.50 | Total: 26.00 | Paid: no\n",
            "Item: Pump | Qty: 1",
        ],
        ["She said that nobody would ever come to that house again.\n", "they did"],
    ],
)
def test_a_wrapped_line_goes_on(sentences: list[str]) -> None:
    text = "".join(sentences)
    assert [text[a:b] for a, b in pairwise(sentences_of(text))] == sentences


def test_only_blank_lines_separate_paragraphs() -> None:
    text = "\n\n one\ntwo  \n\t\nthree\r\n\r\nfour \n"
    found = list(paragraphs(text))
    assert [piece for _, piece in found] == ["one\ntwo", "three", "four"]
    assert all(text[at : at + len(piece)] == piece for at, piece in found)


def test_a_long_run_of_white_space_does_not_take_quadratic_time() -> None:
    text = "a" + " " * 60_000 + "b\n\nc"
    start = time.perf_counter()
    assert [at for at, _ in paragraphs(text)] == [0, len(text) - 1]
    assert time.perf_counter() - start < 1


def test_a_character_of_several_bytes_that_a_window_cuts_belongs_to_both(reader: Backbone) -> None:
    text = "aé€🥧b"
    segments = segment_text(text, reader, 4, "window")
    assert pieces(segments, text) == ["aé€", "€🥧", "🥧b"]


@pytest.mark.parametrize(
    ("text", "how"),
    [("", "window"), ("", "sentence"), ("", "paragraph"), (" \n\n\t ", "paragraph")],
)
def test_a_text_without_tokens_is_refused(reader: Backbone, text: str, how: str) -> None:
    with pytest.raises(DataError, match="the text has no tokens"):
        segment_text(text, reader, 8, how)


@settings(max_examples=200, deadline=None)
@given(
    text=TEXTS,
    length=st.integers(1, 9),
    how=st.sampled_from(["window", "sentence", "paragraph"]),
    whole_words=st.booleans(),
)
def test_segments_cover_a_text_in_order_with_spans_that_contain_their_tokens(
    reader: Backbone, text: str, length: int, how: Segmentation, whole_words: bool
) -> None:
    """Paragraphs cover all but white space between them."""
    assume(text.strip() if how == "paragraph" else text)
    segments = segment_text(text, reader, length, how, whole_words=whole_words)
    assert int(segments.lengths.max()) <= length
    missing, found, previous = uncovered(segments, text), spans(segments), 0
    if how != "paragraph":
        assert missing == []
        assert segments.ids[segments.mask].tolist() == reader.token_ids(text)
        assert (found[0][0], found[-1][1]) == (0, len(text))
    else:
        assert all(text[at].isspace() for at in missing)
        for at, piece in paragraphs(text):
            assert not set(missing) & set(range(at, at + len(piece)))
            assert piece == piece.strip()
            assert not any(not line.strip() for line in piece.split("\n"))
    for row, (start, end) in enumerate(found):
        ids = segments.ids[row, : int(segments.lengths[row])].tolist()
        inside = reader.token_ids(text[start:end])
        # A window may cut a character; its span still contains its tokens.
        assert any(inside[at : at + len(ids)] == ids for at in range(len(inside)))
        assert previous <= start < end <= len(text)
        previous = start


def test_windows_do_not_divide_the_rows_of_tables(reader: Backbone) -> None:
    rows = [f"A: {n} | B: {n * n}" for n in range(20)]
    for before in ("", "Some words before. "):
        text = f"{before}\n" + "\n".join(rows)
        for size in (24, 31, 40):
            segments = segment_text(text, reader, size, "window")
            found = pieces(segments, text)
            assert all(any(row in piece for piece in found) for row in rows)
            assert all(text[at].isspace() for at in uncovered(segments, text))
    # A row that is longer than a window is divided.
    assert segment_text(rows[3], reader, 4, "window").lengths.tolist()[0] == 4
    for other in ("a | b\nc | d", "Note: a\nNote: b", "a: b | c"):
        plain = segment_text(other, reader, 4, "window")
        assert plain.lengths.tolist()[:-1] == [4] * (len(plain) - 1)


def test_the_row_of_a_table_is_one_sentence() -> None:
    rows = ["Name: Dr. Ann Lee. | Rent: 9\n", "Name: Bo | Note: Late. Paid.\n"]
    text = "".join(["One. ", "Two.\n", *rows, "Three."])
    borders = sentences_of(text)
    assert [text[a:b] for a, b in pairwise(borders)] == ["One. ", "Two.\n", *rows, "Three."]
