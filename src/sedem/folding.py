"""Words in the form in which they are compared, however they are written.

"Zoë" and "ZOE" are one word, "1,240" and "1 240" one number, "HK-2093" and "HK2093" one code. The
index of a bank's words, questions, the search for spans and the check of answers all fold here.
Places count the characters of the text as it is.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Japanese, Chinese
)
"""Characters of scripts that put no spaces between words, as ranges for a regular expression."""
_LETTERS = re.compile(f"[{UNSPACED}]")
_UNSEEN = "\u00ad\u200b-\u200f\u2060-\u2064\ufeff"
"""Characters inside words that show nothing, such as soft hyphens."""
_NUMBER = r"\d{1,3}(?:['\u2019\u00a0\u2009\u202f]\d{3})+(?!\d)(?:[.,]\d+)?|\d+(?:[.,:]\d+)*"
_WORD = re.compile(rf"{_NUMBER}|[{UNSPACED}]|[^\W\d_{UNSPACED}]+")
_WITHIN = re.compile(rf"[{_UNSEEN}]*(?:[-\u2010][ \t]*\r?\n[ \t]*)?")
_HIDDEN = re.compile(f"[{_UNSEEN}\u0640]+")
_MARKS = "\u0300-\u1fff\ua800-\uabff\U00011000-\U00011fff"
"""Among these are the marks that are vowels; words have no other signs of these ranges."""
_PART = re.compile(rf"{_NUMBER}|[^\W\d_](?:[^\W\d_]|[{_MARKS}])*")
_SIGNS = "$€£¥₹+-\u2212"
_HYPHEN = re.compile(r"[-\u2010\u2011]?|[-\u2010][ \t]*\r?\n[ \t]*")
_SIGN = re.compile(r"[()/._]{1,2}")
_SPACE = re.compile(r"[ \u00a0\u2009\u202f][-\u2010\u2011(/]{0,2} ?|\)? ?")
_THOUSANDS = re.compile(r"(?<![\d.,:])[1-9]\d{0,2}(?: \d{3})+(?![\d:])(?:[.,]\d+)?")
_BETWEEN = re.compile(r"[\s()/_+\u2010\u2011-]+")
_ALIKE = str.maketrans(
    {
        "ø": "o",
        "ł": "l",
        "đ": "d",
        "ð": "d",
        "ħ": "h",
        "ŧ": "t",
        "\u0131": "i",
        "æ": "ae",
        "œ": "oe",
    }
)
_COMMON = tuple(
    frozenset(words.split())
    for words in (
        "a about all am an and any are as at be been but by can could did do does each for from "
        "had has have he her here him his how i if in into is it its may me might much many "
        "must my no not of on or our shall she should so some than that the their them then "
        "there these they this those to us was we were what when where which who whom whose why "
        "will with would you your",
        "aber als am an auch auf aus bei bin bis das dass dem den der des die dies diese dieser "
        "ein eine einem einen einer es fur hat hatte ich ihr im in ist kann mein mit muss nach "
        "nicht oder sein sie sind so soll uber um und uns unser von vor wann war waren warum "
        "was welche welchem welchen welcher welches wem wen wenn wer werden wie wieviel wird "
        "wir wo wurde zu zum zur",
        "a au aux avec c ce ces cet cette combien comment d dans de des du elle en est et etait "
        "il ils j je l la le les leur lequel laquelle m ma mon n ne nous on ont ou par pas pour "
        "pourquoi qu quand que quel quelle quelles quels qui quoi s sa se ses son sont sur un "
        "une vous y",
        "a al como con cual cuales cuando cuanta cuantas cuanto cuantos de del donde el ella en "
        "era es esta este fue ha han la las lo los me mi no o para pero por porque que quien "
        "quienes se ser si sin son su sus un una y",
        "a ai al alla chi che come con cosa cui da dal dei del della di dove e era gli ha hanno "
        "i il in io la le lo ma mi nel nella non o per perche piu qual quale quali quando "
        "quanta quante quanti quanto se si sono su sul sulla suo sua un una uno",
    )
)
"""Folded words of grammar in English, German, French, Spanish and Italian."""
LONGEST = 34
"""Characters of the longest number or code that is known in one piece: an IBAN."""


class Term(NamedTuple):
    """A folded word of a text, and where it stands."""

    key: str
    start: int
    end: int


class Written(NamedTuple):
    """A word, number or code as it stands in a text.

    Attributes:
        terms: its parts: "HK-2093" has two.
        pieces: what it consists of, if it has spaces or hyphens: words as they are written.
        whole: the terms in one piece; None if there is only one, or if it would be too long.
        is_code: whether it has digits, and no small letters.
    """

    start: int
    end: int
    terms: tuple[Term, ...]
    pieces: tuple[Written, ...] = ()
    whole: str | None = None
    is_code: bool = False


class Asked(NamedTuple):
    """A word of a question.

    Attributes:
        text: as the question has it.
        keys: what an index may have for it, terms in order; one of them is enough.
        otherwise: what stands in if an index has none of them; None if nothing does.
    """

    text: str
    keys: tuple[str, ...]
    otherwise: tuple[Asked, ...] | None = None


def words_of(text: str) -> list[tuple[int, int]]:
    """Return where each word of a text begins and ends.

    A number is one word, whatever separates its digits, and has its sign or currency. So is a word
    that is divided at the end of a line. In scripts without spaces every letter is a word, because
    nothing tells where a word ends.
    """
    words: list[tuple[int, int]] = []
    for found in _WORD.finditer(text):
        start, end = found.span()
        first, last = words[-1] if words else (0, 0)
        if start < last:
            continue  # a mark of the letter before it
        while end < len(text) and unicodedata.category(text[end])[0] == "M":
            end += 1
        # Marks inside a word, such as vowel signs, do not end it; neither does the end of a line
        # that divides it.
        is_near = words and start - last <= LONGEST
        inside = _WITHIN.fullmatch(text, last, start) if is_near else None
        if (
            inside
            and not (_is_letter(text[first]) or _is_letter(text[start]))
            and ("\n" not in inside[0] or (text[last - 1].isalpha() and text[start].isalpha()))
        ):
            words[-1] = first, end
            continue
        if found[0][0].isdigit() and start and text[start - 1] in _SIGNS:
            start -= 1
        words.append((start, end))
    return words


def _is_letter(character: str) -> bool:
    """Whether a character is of a script without spaces; its digits make numbers as others do."""
    return _LETTERS.match(character) is not None and not character.isdigit()


def written(text: str) -> Iterator[Written]:
    """Yield the words, numbers and codes of a text; those of scripts without spaces as pairs."""
    places = [_joined(text, [], place) for place in words_of(text)]
    words: list[Written] = []
    for chain in _chains(places, partial(_joins, text)):
        if not _is_letter(text[chain[0].start]):
            words.append(_joined(text, chain))
            continue
        # Nothing tells where a word ends, so both text and question have every pair.
        for first, last in pairwise(chain) if len(chain) > 1 else [chain * 2]:
            term = Term(_fold(text[first.start : last.end]), first.start, last.end)
            words.append(Written(first.start, last.end, (term,)))
    for chain in _chains(words, partial(_goes_on, text)):
        yield _joined(text, chain)


def _chains(
    words: Sequence[Written], joins: Callable[[Written, Written], bool]
) -> list[list[Written]]:
    chains: list[list[Written]] = []
    for word in words:
        if chains and joins(chains[-1][-1], word):
            chains[-1].append(word)
        else:
            chains.append([word])
    return chains


def _joined(text: str, chain: Sequence[Written], place: tuple[int, int] | None = None) -> Written:
    """Return a chain of words as one, or the word at a place."""
    if len(chain) == 1:
        return chain[0]
    start, end = place or (chain[0].start, chain[-1].end)
    raw = text[start:end]
    terms = (
        tuple(Term(key, start, end) for key in _parts(raw))
        if place
        else tuple(term for one in chain for term in one.terms)
    )
    whole = "".join(_parts(_BETWEEN.sub("", raw))) if len(terms) > 1 else ""
    is_code = raw == raw.upper() and any(map(str.isdigit, raw))
    return Written(
        start, end, terms, tuple(chain), whole if 0 < len(whole) <= LONGEST else None, is_code
    )


def _joins(text: str, one: Written, other: Written) -> bool:
    """Whether two words are one, such as parts of a code; letters without spaces join others."""
    between, letter = text[one.end : other.start], _is_letter(text[one.start])
    if len(between) > LONGEST or _is_letter(text[other.start]) != letter:
        return False
    if letter:
        return not _HIDDEN.sub("", between)
    if _HYPHEN.fullmatch(between):
        return True
    return bool(_SIGN.fullmatch(between)) and any(map(str.isdigit, text[one.start : other.end]))


def _goes_on(text: str, one: Written, other: Written) -> bool:
    """Whether groups of digits may belong together, as those of an account's number do."""
    both = one.is_code and other.is_code and other.start - one.end <= LONGEST
    return both and bool(_SPACE.fullmatch(text, one.end, other.start))


def terms_of(text: str) -> list[Term]:
    """Return the folded words of a text in order, and then its numbers and codes in one piece."""
    found = list(written(text))
    parts = [term for one in found for term in one.terms]
    wholes = [
        Term(word.whole, word.start, word.end)
        for one in found
        for word in (one, *one.pieces)
        if word.whole
    ]
    for number in _THOUSANDS.finditer(text):
        wholes += [Term(key, *number.span()) for key in _parts(number[0].replace(" ", ""))]
    return parts + list(dict.fromkeys(wholes))


def folded(text: str) -> str:
    """Return a text as an index of words has it."""
    return " ".join(term.key for term in terms_of(text))


def asked_words(question: str) -> list[Asked]:
    """Return the words of a question, each once, in order."""
    found: dict[tuple[str, ...], Asked] = {}
    for asked in (asked for one in written(question) for asked in _asked(question, one)):
        found.setdefault(asked.keys, asked)
    return list(found.values())


def common_words(question: str) -> frozenset[str]:
    """Return the folded words of grammar of the language that a question seems to be in.

    In a folder of many languages, or of numbers, "the" and "for" would seem rare and telling.
    """
    keys = {term.key for term in terms_of(question)}
    return max(_COMMON, key=lambda words: len(words & keys))


def _asked(text: str, one: Written) -> Iterator[Asked]:
    spelled, keys = text[one.start : one.end].lstrip("+-\u2212"), [key for key, *_ in one.terms]
    if len(keys) == 1:
        yield Asked(spelled, (keys[0],))
    if len(keys) < 2:
        return
    parts = [asked for piece in one.pieces for asked in _asked(text, piece)]
    parts = parts or [Asked(key, (key,)) for key in keys]
    whole = [one.whole] if one.whole else []
    if one.is_code:
        # Its parts alone may be those of others.
        yield Asked(spelled, (" ".join(keys), *whole), tuple(parts))
    else:
        yield from parts
        yield from (Asked(spelled, (key,), ()) for key in whole)


def keys_of(word: str) -> tuple[list[str], str | None]:
    """Return the terms of a word of a question, and what they are in one piece."""
    found = list(written(word))
    return [term.key for one in found for term in one.terms], found[0].whole if found else None


def is_letter(key: str) -> bool:
    """Whether a folded word is one letter of a script without spaces, which may begin any pair."""
    return _is_letter(key[0]) and len(words_of(key)) == 1


def shown(text: str) -> str:
    """Return a text without soft hyphens and spaces of no width."""
    return re.sub("[\u00ad\u200b\u2060\ufeff]", "", text)


@lru_cache(maxsize=2**15)
def _parts(word: str) -> tuple[str, ...]:
    """Fold a word, and separate its letters from its numbers."""
    found: list[str] = []
    for part in _PART.findall(_fold(word)):
        found += _number(part) if part[0].isdigit() else [part]
    return tuple(found)


def _fold(word: str) -> str:
    """Fold the letters and digits of a word, which keeps the marks that are vowels."""
    if word.isascii():
        return word.lower()
    word = _HIDDEN.sub("", re.sub(r"(?<=\d)[\u00a0\u2009\u202f](?=\d)", "'", word))
    pieces = unicodedata.normalize("NFKD", word).casefold()
    kept = (
        str(unicodedata.decimal(one)) if one.isdecimal() else one
        for one in pieces
        # Accents of Latin, Greek and Cyrillic, points of Hebrew and Arabic.
        if not (unicodedata.combining(one) >= 200 or 10 <= unicodedata.combining(one) <= 36)
    )
    return unicodedata.normalize("NFC", "".join(kept)).translate(_ALIKE)


def _number(text: str) -> list[str]:
    """Return a number without separators of thousands and needless zeros; dates are several."""
    groups, signs = re.split(r"\D", text), re.findall(r"\D", text)
    is_whole = 1 <= len(groups[0]) <= 3 and groups[0][0] != "0" and ":" not in signs
    if is_whole and len({*signs}) == 1 and all(len(group) == 3 for group in groups[1:]):
        return ["".join(groups)]
    grouped = len(signs) == 1 or (is_whole and all(len(group) == 3 for group in groups[1:-1]))
    if signs and grouped and signs[-1] in ".," and signs[-1] not in signs[:-1]:
        whole, fraction = "".join(groups[:-1]).lstrip("0") or "0", groups[-1].rstrip("0")
        return [f"{whole}.{fraction}" if fraction else whole]
    return [group.lstrip("0") or "0" for group in groups]
