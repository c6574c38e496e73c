"""Text in any encoding: a mark, UTF-8, what HTML says, and a guess with a note."""

from __future__ import annotations

from pathlib import Path

import pytest

from sedem.errors import DataError
from sedem.reading.document_formats import decode, is_text

GERMAN = "Das Büro kostet 1.240 € im Monat.\r\n"


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", GERMAN),
        ("cp1252", "L\u2019été, le loyer s\u2019élève à 900 € — payé à l\u2019avance."),
        ("cp1250", "Czynsz wynosi 900 złotych miesięcznie, płatny z góry."),
        ("cp1251", "Цена дома 900 рублей. Аренда оплачивается до пятого числа."),
        ("koi8-r", "Цена дома 900 рублей. Аренда оплачивается до пятого числа."),
        ("cp1253", "Η κουζίνα είναι μεγάλη και φωτεινή."),  # noqa: RUF001
        ("shift_jis", "家賃は月額九万円です。ペットは禁止されています。"),
        ("gb18030", "租金为每月九百元。不允许养宠物。"),
        ("utf-16-le", "The rent is 900."),
        ("utf-16-be", GERMAN),
        ("mac_roman", "Das Büro kostet viel. Größe: drei Räume."),
    ],
)
def test_an_encoding_is_guessed_with_a_note(encoding: str, text: str) -> None:
    for times in (1, 20):
        found, (note,) = decode(Path("a.txt"), (text * times).encode(encoding), None)
        assert found == text * times
        assert note.startswith("'a.txt' does not say its encoding; it was read as ")
    late = "A line of ASCII.\n" * 9000 + "Das Büro kostet viel.\n"
    assert decode(Path("a.txt"), late.encode("cp1252"), None)[0] == late


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_mark_decides_even_against_what_is_told(encoding: str) -> None:
    for told in (None, "latin-1"):
        assert decode(Path("a.txt"), GERMAN.encode(encoding), told) == (GERMAN, ())


@pytest.mark.parametrize(
    "head", ["<meta charset=windows-1251>", "<META CHARSET='cp1251'>",
             '<meta http-equiv="Content-Type" content="text/html; charset=windows-1251">']
)  # fmt: skip
def test_html_names_its_encoding(head: str) -> None:
    page = f"<html><head>{head}</head><p>Цена 900."
    assert decode(Path("a.html"), page.encode("cp1251"), None) == (page, ())
    # Saved again as UTF-8, it still says what it said.
    assert decode(Path("a.html"), page.encode(), None) == (page, ())
    unknown = page.replace("1251", "9999").encode("cp1251")
    assert decode(Path("a.html"), unknown, None)[1]


@pytest.mark.parametrize(
    "content", [b"text\0text", b"\x89PNG\r\n\x1a\n\0\0\0\xff", bytes(range(256))]
)
def test_binary_data_is_no_text(content: bytes) -> None:
    with pytest.raises(DataError, match=r"^'a\.txt' holds binary data, not text; save it as plain"):
        decode(Path("a.txt"), content, None)
    assert not is_text(content)


def test_what_looks_like_text() -> None:
    cut = "Das Büro ä".encode()[:-1]
    for head in (b"text", cut, GERMAN.encode("cp1252"), GERMAN.encode("utf-16")):
        assert is_text(head)
    assert not is_text(b"")
