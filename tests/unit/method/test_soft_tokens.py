"""Memory without a decompressor: slots as soft tokens at the decoder's input."""

from __future__ import annotations

import pytest
import torch

from sedem import Document, SeDeM, SedemConfig
from sedem.answering.decoding import Decoding
from sedem.backbone.decoder import Backbone
from sedem.backbone.prompts import question_ids
from sedem.engine.eager import start_decoding
from sedem.engine.interface import AnswerInputs
from sedem.errors import ConfigError
from sedem.method.injection import SoftTokenDecompressor, step
from sedem_lab.training.stage1 import Stage1, Stage1Losses
from sedem_lab.training.stage2 import Stage2, Stage2Losses

QUESTION = "What is the rent?"
NEXT_TOKEN = Stage1Losses(distill=0.0, reconstruct=0.0)


@pytest.fixture
def direct(config: SedemConfig, backbone: Backbone) -> SeDeM:
    torch.manual_seed(1)
    changed = config.with_changes(decompressor="none", inject_layer=0)
    model = SeDeM(changed, backbone, backbone).eval()
    model.decompressor.calibrate(backbone.model.get_input_embeddings().weight)
    return model


def test_a_slot_is_moved_to_the_mean_and_scale_of_embeddings() -> None:
    torch.manual_seed(0)
    embeddings = torch.randn(200, 6) * torch.tensor([0.1, 0.2, 3.0, 1.0, 0.5, 2.0]) + 4
    module = SoftTokenDecompressor(6)
    module.calibrate(embeddings)
    slots = torch.randn(300, 6) * 500
    soft = module(slots)
    mean, deviation = slots.mean(1, keepdim=True), slots.std(1, keepdim=True, unbiased=False)
    expected = (slots - mean) / deviation * embeddings.std(0) + embeddings.mean(0)
    torch.testing.assert_close(soft, expected, rtol=1e-4, atol=1e-4)
    assert not list(module.parameters())
    assert set(module.state_dict()) == {"spread", "centre"}


@torch.no_grad()
def test_the_decoder_reads_soft_tokens_like_embeddings_of_a_prompt(
    direct: SeDeM, documents: list[Document]
) -> None:
    bank = direct.read(documents)
    prefix = torch.tensor(question_ids(direct.decoder, QUESTION))
    chosen = [0, 2]
    soft_UD = direct.decompressor(bank.memory(chosen).float()).flatten(0, 1)
    inputs = AnswerInputs(bank, chosen, torch.zeros(2), prefix)
    logits_BV, stream = start_decoding(direct, [inputs])
    embed = direct.decoder.model.get_input_embeddings()
    sequence = torch.cat([embed(prefix[:1]), soft_UD, embed(prefix[1:])])
    expected = direct.decoder.model(inputs_embeds=sequence[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits_BV[0], expected[-1], rtol=1e-4, atol=1e-4)
    token = logits_BV.argmax(-1)
    longer = torch.cat([sequence, embed(token)])
    expected = direct.decoder.model(inputs_embeds=longer[None], use_cache=False).logits[0]
    state_BD = step(direct.decoder, direct.config.inject_layer, token, stream)
    logits_V = direct.decoder.logits(state_BD)[0]
    torch.testing.assert_close(logits_V, expected[-1], rtol=1e-4, atol=1e-4)


def test_a_slot_takes_one_position_and_padding_none(
    direct: SeDeM, documents: list[Document]
) -> None:
    bank = direct.read([*documents, Document("short.txt", "Short.")])
    limit = direct.decoder.max_positions - len(question_ids(direct.decoder, QUESTION))
    slots = int((bank.slot_tokens(range(len(bank))) > 0).sum())
    answer = direct.answer(bank, QUESTION, k="all", decoding=Decoding(limit - slots))
    assert answer.k == len(bank)
    with pytest.raises(ConfigError, match=f"^{slots} selected states"):
        direct.answer(bank, QUESTION, k="all", decoding=Decoding(limit - slots + 1))


def test_the_next_token_loss_trains_the_compressor_in_stage_1(direct: SeDeM) -> None:
    stage = Stage1(direct, NEXT_TOKEN)
    ids = torch.randint(2, 258, (2, 21), generator=torch.Generator().manual_seed(0))
    parts = stage(ids[:, :16], ids[:, 16:])
    assert set(parts) == {"loss", "context"}
    parts["loss"].backward()
    assert direct.compressor.w_in.weight.grad is not None
    assert float(direct.compressor.w_in.weight.grad.norm()) > 0


@torch.no_grad()
def test_the_next_token_loss_is_that_of_soft_tokens_and_continuation(direct: SeDeM) -> None:
    ids = torch.randint(2, 258, (1, 21), generator=torch.Generator().manual_seed(0))
    context, after = ids[:, :16], ids[:, 16:]
    found = Stage1(direct, NEXT_TOKEN)(context, after)["context"]
    embed = direct.decoder.model.get_input_embeddings()
    start = torch.tensor([direct.decoder.bos_token_id])
    output = direct.encoder.model(
        input_ids=torch.cat([start, context[0]])[None], output_hidden_states=True
    )
    hidden_TE = output.hidden_states[3][0, 1:]
    slots_MD = hidden_TE.unflatten(0, (4, 4)).mean(1) @ direct.compressor.w_in.weight.T
    sequence = torch.cat([embed(start), direct.decompressor(slots_MD), embed(after[0, :-1])])
    logits = direct.decoder.model(inputs_embeds=sequence[None], use_cache=False).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[4:], after[0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["distill", "reconstruct", "regress"])
def test_losses_on_restored_states_are_refused(direct: SeDeM, name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"losses\.{name} is 0\.5, but a model without .* set losses\.{name} to 0$",
    ):
        Stage1(direct, NEXT_TOKEN.with_changes(**{name: 0.5}))
    if name == "reconstruct":
        with pytest.raises(ConfigError, match=r"losses\.reconstruct is 0\.1, but a model"):
            Stage2(direct, Stage2Losses(), None)
