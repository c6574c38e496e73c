"""Fine-tuned full context: the frozen reader with adapters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from unit.baselines.conftest import make

from sedem import Document
from sedem.answering.decoding import Decoding
from sedem.backbone.loading import open_backbone
from sedem.baselines.full_context import FullContext
from sedem.errors import ConfigError
from sedem.training.targets import targets


def test_without_training_it_equals_the_frozen_reader(
    tiny_folder: Callable[..., str], documents: list[Document]
) -> None:
    reader = make("full-context-tuned", tiny_folder())
    with torch.no_grad():
        for parameter in reader.backbone.lora_parameters():
            parameter.zero_()
    decoding = Decoding(max_new_tokens=8)
    frozen = FullContext(open_backbone(tiny_folder()), decoding)
    for given in (documents, [Document("long", "The rent is 900 euros. " * 50)]):
        own = reader.answer(reader.read(given), "What is the rent?", decoding=decoding)
        other = frozen.answer(frozen.read(given), "What is the rent?")
        for name in ("text", "citations", "conditioning", "stored_bytes", "context_tokens"):
            assert getattr(own, name) == getattr(other, name), name
        assert len(own.cut) == len(other.cut)


@torch.no_grad()
def test_the_loss_matches_hugging_faces_forward(tiny_folder: Callable[..., str]) -> None:
    reader = make("full-context-tuned", tiny_folder())
    contexts = [torch.randint(2, 250, (n,)) for n in (30, 12)]
    pairs = [([0, 5, 6, 7], [8, 9, 1]), ([0, 4], [11, 12, 13, 1])]
    loss = reader.question_loss(contexts, **targets(pairs))["loss"]
    expected = []
    for context, (prefix, answer) in zip(contexts, pairs, strict=True):
        row = torch.tensor([[prefix[0], *context.tolist(), *prefix[1:], *answer]])
        logits = reader.backbone.model(input_ids=row).logits[0, -len(answer) - 1 : -1]
        expected.append(float(F.cross_entropy(logits, torch.tensor(answer))))
    assert float(loss) == pytest.approx(sum(expected) / 2, rel=1e-4)


def test_it_has_no_training_on_text(tiny_folder: Callable[..., str]) -> None:
    reader = make("full-context-tuned", tiny_folder())
    row = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ConfigError, match="is not trained on text; give its recipe questions"):
        reader.text_loss(row, row)
