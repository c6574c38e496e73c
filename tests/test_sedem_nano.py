"""The shipped model on the bundled documents: from files to answers and their sources."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sedem import Decoding, Document, MemoryBank, SeDeM
from sedem.checkpoint.folder import locate
from sedem.cli.main import app
from sedem.demo import DOCUMENTS, QUESTIONS
from sedem.engine.kept import KeptBudget
from sedem.engine.static import keeping_engine

SOURCES = {
    "Who founded the Eastman Kodak Company?": ("george-eastman.txt", "Eastman Kodak Company"),
    "In what year was Ulysses launched?": ("ulysses-spacecraft.txt", "launched"),
    "What are cacao flowers pollinated by?": ("theobroma-cacao.txt", "pollinated"),
    "Who wrote American Pie?": ("the-day-the-music-died.txt", "American Pie"),
    "What is the weight of shipment HK-2093?": ("harbour-register.txt", "3175 kg"),
    "Who is the mayor of Belholm?": ("harbour-register.txt", "Jonas Wenrick"),
    "When was Thea Karbach born?": ("harbour-register.txt", "22 June 1911"),
}


@pytest.fixture(scope="module")
def model() -> SeDeM:
    return SeDeM.from_pretrained("sedem-nano", device="cpu")


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return [Document(p.name, p.read_text("utf-8")) for p in sorted(DOCUMENTS.glob("*.txt"))]


@pytest.fixture(scope="module")
def bank(model: SeDeM, documents: list[Document]) -> MemoryBank:
    return model.read(documents)


def same_blocks(bank: MemoryBank, documents: list[Document]) -> MemoryBank:
    """The blocks of a bank as those of other documents of the same texts; nothing is read."""
    memory = bank.stored(range(len(bank)))
    return MemoryBank(bank.fingerprint, bank.made_by, documents, bank.blocks, memory)


def test_it_travels_whole_and_small() -> None:
    files = [path for path in locate("sedem-nano").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 45_000_000
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".md"}


@pytest.mark.parametrize("question", QUESTIONS)
def test_demo_questions_cite_the_place_where_the_answer_is(
    question: str, model: SeDeM, bank: MemoryBank, documents: list[Document]
) -> None:
    name, words = SOURCES[question]
    answer = model.answer(bank, question, k=2, decoding=Decoding(max_new_tokens=16))
    assert any(c.document == name and words in c.text for c in answer.citations), answer.citations
    texts = {document.name: document.text for document in documents}
    assert all(texts[c.document][c.start : c.end] == c.text for c in answer.citations)
    assert answer.k == 2 and answer.text.strip()


QUIET = (
    "The workshop stands behind the old mill and has three large windows to the north. In winter "
    "the stove is lit at six in the morning, and somebody brings bread from the village. The "
    "benches were made by the grandfather of the present owner, who was a joiner. Visitors are "
    "welcome on most days, though the dog barks at everyone who comes with a hat. "
)


@pytest.mark.parametrize(
    ("before", "code", "after", "question"),
    [
        ("The product code of the yellow lamp is ", "V-77", ", and it costs nine euros. ",
         "What is the product code of the yellow lamp?"),
        ("The lamp was checked on ", "2026-11-29", " by the owner. ",
         "When was the lamp checked?"),
        ("The address for complaints is ", "ida.klein@mill.example.org", ", which is read daily. ",
         "What is the address for complaints?"),
    ],
)  # fmt: skip
def test_a_code_at_the_end_of_a_block_is_answered_whole(
    before: str, code: str, after: str, question: str, model: SeDeM
) -> None:
    """Both the citation and the answer ended within it: "V|-77"."""
    length, tried = model.config.segment_length, 0
    for more in range(60):
        start = QUIET + "So it is" + " very" * more + " quiet. " + before
        text = f"{start}{code}{after}{QUIET}"
        [spans] = model.encoder.tokenize([text], offsets=True)["offset_mapping"]
        if not len(start) < spans[length][0] < len(start) + len(code):
            continue
        tried += 1
        answer = model.answer(model.read([Document("notes.txt", text)]), question, k=2)
        assert code in answer.text, (text[: spans[length][0]][-20:], answer.text)
        assert all(code in one.text for one in answer.citations)
    assert tried > 1


def test_the_fast_path_answers_like_the_reference(model: SeDeM, documents: list[Document]) -> None:
    reference = SeDeM.from_pretrained("sedem-nano", device="cpu", engine="eager")
    assert (model.engine.name, reference.engine.name) == ("static", "eager")
    limit = Decoding(max_new_tokens=16)
    few = [d for d in documents if d.name in ("george-eastman.txt", "harbour-register.txt")]
    expected = reference.answer(reference.read(few), QUESTIONS, decoding=limit)
    answers = model.answer(model.read(few), QUESTIONS, decoding=limit)
    assert [a.text for a in answers] == [a.text for a in expected]
    for ours, theirs in zip(answers, expected, strict=True):
        assert [c.text for c in ours.citations] == [c.text for c in theirs.citations]


def test_invented_facts_come_out_of_memory(model: SeDeM, bank: MemoryBank) -> None:
    """Nothing else knows them. Most must be right: rounding differs between processors."""
    invented = {q: words for q, (name, words) in SOURCES.items() if name == "harbour-register.txt"}
    answers = model.answer(bank, list(invented), k=2, decoding=Decoding(max_new_tokens=16))
    right = [a.text == words for a, words in zip(answers, invented.values(), strict=True)]
    assert sum(right) >= len(right) - 1, [a.text for a in answers]


def test_its_answers_come_from_memory(model: SeDeM, bank: MemoryBank) -> None:
    """The invented register: with other blocks, or none, the answers are others."""
    invented = [q for q in QUESTIONS if SOURCES[q][0] == "harbour-register.txt"]
    limit = Decoding(max_new_tokens=16)
    with_memory = [answer.text for answer in model.answer(bank, invented, k=1, decoding=limit)]
    without = [answer.text for answer in model.answer(bank, invented, decoding=limit, blocks=[])]
    assert all(a != b for a, b in zip(with_memory, without, strict=True))


def test_a_bank_on_disk_answers_as_the_one_in_memory(
    tmp_path: Path, model: SeDeM, bank: MemoryBank
) -> None:
    path = tmp_path / "demo.bank"
    bank.save(path)
    ours = model.answer(bank, QUESTIONS[4], k=2)
    output = CliRunner().invoke(app, ["ask", str(path), QUESTIONS[4], "-k", "2", "--json"])
    assert output.exit_code == 0, output.output
    told = json.loads(output.stdout)
    assert told["answer"] == ours.text
    assert [c["text"] for c in told["citations"]] == [c.text for c in ours.citations]


@pytest.mark.slow
def test_more_memory_does_not_hurt(
    model: SeDeM, bank: MemoryBank, documents: list[Document]
) -> None:
    """The invented register, with other blocks beside it: more, in another order, and twice."""
    invented = [q for q in QUESTIONS if SOURCES[q][0] == "harbour-register.txt"]
    limit = Decoding(max_new_tokens=16)
    backwards = model.read(documents[::-1])
    doubled = same_blocks(bank, documents)
    doubled.append(same_blocks(bank, [Document(f"copy of {d.name}", d.text) for d in documents]))
    for question in invented:
        alone = model.answer(bank, question, k=1, decoding=limit).text
        for memory, k in ((bank, 2), (bank, 8), (bank, "all"), (backwards, 8), (doubled, 8)):
            answer = model.answer(memory, question, k=k, decoding=limit)
            assert answer.text == alone, (question, k)
            assert answer.k == (len(memory) if k == "all" else k)


def test_auto_takes_as_many_blocks_as_a_question_needs(model: SeDeM, bank: MemoryBank) -> None:
    answer = model.answer(bank, QUESTIONS[4], k="auto", decoding=Decoding(max_new_tokens=16))
    assert model.config.auto_min <= answer.k <= model.config.auto_max
    assert any(SOURCES[QUESTIONS[4]][1] in c.text for c in answer.citations)


def own_bytes() -> int:
    """Memory of this process that no file holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


@pytest.mark.slow
def test_two_thousand_blocks_take_one_cache_which_is_freed() -> None:
    budget = 2**29
    kept = KeptBudget(ram_bytes=budget)
    model = SeDeM.from_pretrained("sedem-nano", device="cpu", kept=kept)
    text = "\n\n".join(p.read_text("utf-8") for p in sorted(DOCUMENTS.glob("*.txt")))
    once = model.read([Document("0.txt", text)])
    bank = model.read([Document("start.txt", text)])
    while len(bank) < 2000:
        bank.append(same_blocks(once, [Document(f"{len(bank)}.txt", f"{text} {len(bank)}")]))
    model.answer(bank, QUESTIONS[0], k=2)
    before, peak = own_bytes(), 0
    stream = model.stream(bank, QUESTIONS[0], k="all", decoding=Decoding(8))
    for _ in stream:
        peak = max(peak, own_bytes())
    assert stream.answer is not None
    assert stream.answer.k == len(bank) >= 2000
    assert stream.answer.conditioning > 100 * model.decoder.max_positions
    assert 0 < model.engine.memory()["kept"] <= budget
    cache = keeping_engine(model.engine).kept.entry_bytes(stream.answer.conditioning)
    assert peak - before < cache + 2 * budget
    gc.collect()
    assert own_bytes() - before < 2 * budget
