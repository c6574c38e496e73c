"""Reading documents into a bank, with every compressor and mixture."""

from __future__ import annotations

import pytest
import torch
from answers import QUESTIONS, RENT, SHORT, assert_cites, build
from conftest import LEASE, POSITIONS

from sedem import Decoding, Document, SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem.inference.read import compress
from sedem.method.segments import segment_text


def test_reading_twice_gives_the_same_bank(model: SeDeM, documents: list[Document]) -> None:
    one, two = model.read(documents), model.read(documents)
    assert torch.equal(one.memory(range(len(one))), two.memory(range(len(two))))
    assert one.blocks == two.blocks


def test_no_block_of_a_paragraph_reaches_into_the_next(
    config: SedemConfig, backbone: Backbone, documents: list[Document]
) -> None:
    model = build(config, backbone, segmentation="paragraph")
    answer = model.answer(model.read(documents), RENT, k="all", decoding=Decoding(2))
    assert len(answer.citations) > 3
    assert not any("\n\n" in citation.text for citation in answer.citations)


@pytest.mark.parametrize("kind", ["linear", "mlp", "query"])
def test_every_compressor_reads_answers_and_cites(
    kind: str, config: SedemConfig, backbone: Backbone, documents: list[Document]
) -> None:
    model = build(config, backbone, compressor=kind)
    bank = model.read(documents)
    answers = model.answer(bank, QUESTIONS, decoding=SHORT)
    for answer in answers:
        assert_cites(answer, documents)
    whole = model.answer(bank, RENT, k="all", decoding=Decoding(2))
    # Learned queries look at the whole segment; so does what is cited for them.
    spans = sorted((c.start, c.end) for c in whole.citations if c.document == "lease.txt")
    assert spans == [(i, min(i + 16, len(LEASE))) for i in range(0, len(LEASE), 16)]


def test_compressors_differ(
    config: SedemConfig, backbone: Backbone, documents: list[Document]
) -> None:
    texts = set()
    for kind in ("linear", "mlp", "query"):
        model = build(config, backbone, compressor=kind)
        answers = model.answer(model.read(documents), QUESTIONS, decoding=SHORT)
        texts.add(tuple(answer.text for answer in answers))
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("layers", "mixing"), [((1, 3), "uniform"), ((1, 2, 4), "learned"), ((3, 1), "learned")]
)
def test_mixtures_of_layers_read_and_answer(
    layers: tuple[int, ...],
    mixing: str,
    config: SedemConfig,
    backbone: Backbone,
    documents: list[Document],
) -> None:
    model = build(config, backbone, extract_layers=layers, layer_mixing=mixing)
    if mixing == "learned":
        with torch.no_grad():
            model.mixture.logits.copy_(torch.arange(len(layers)) * 2.0)
    mixed = model.read(documents)
    assert_cites(model.answer(mixed, RENT, decoding=SHORT), documents)
    alone = build(config, backbone, extract_layers=layers[-1:]).read(documents)
    everything = range(len(mixed))
    assert not torch.equal(mixed.memory(everything), alone.memory(everything))


def test_a_text_may_exceed_the_positions_of_the_backbone(model: SeDeM) -> None:
    bank = model.read([Document("long.txt", LEASE * 9)])
    answer = model.answer(bank, RENT, decoding=SHORT)
    assert answer.blocks == -(-9 * len(LEASE) // 16) > POSITIONS / 16


@pytest.mark.parametrize("kind", ["linear", "mlp", "query"])
def test_memory_of_padding_is_zero(kind: str, config: SedemConfig, backbone: Backbone) -> None:
    """An MLP maps a pooled zero to something else; the bytes of a bank must not show it."""
    model = build(config, backbone, compressor=kind)
    for parameter in model.compressor.parameters():
        torch.nn.init.normal_(parameter)
    # A full segment of 16 tokens and one of 6, whose third and fourth slots are padding.
    segments = segment_text("x" * 22, backbone, 16, "window")
    memory_SMD = compress(model, model.engine, segments.ids, segments.lengths)
    assert memory_SMD.ne(0).any(-1).tolist() == [[True] * 4, [True, True, False, False]]
