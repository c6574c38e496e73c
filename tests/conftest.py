"""Tiny random models of every family, built without network or downloads."""

from __future__ import annotations

import gc
import json
import os

# Tiny models gain nothing from threads and lose much on shared cores; torch reads it on import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The default model's backbone would have to be fetched; sedem reads this on import, too.
os.environ["SEDEM_MODEL"] = "sedem-nano"
# The command line sets this before the hub's client is imported.
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest
import torch
from gguf_files import write_gguf
from object_server import ObjectServer, running
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)

from sedem import Document, MemoryBank, SeDeM, SedemConfig
from sedem.answering.running import RunningAnswers
from sedem.backbone import gguf, tokenizer
from sedem.backbone.decoder import FAMILIES, Backbone
from sedem.backbone.loading import open_backbone

START, END = "<start>", "<end>"
WIDTH, DEPTH, POSITIONS = 32, 4, 512

TURN, TURN_END = "<turn>", "</turn>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m.role }}\n{{ m.content | trim }}</turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n"
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{% endif %}"
)

LEASE = (
    "The flat in Mill Lane 4 is let from 1 May. The rent is 900 euros a month, due on the third "
    "working day. The tenant may leave with three months' notice. Pets need the landlord's word. "
    "The deposit of 1,800 euros is paid back within six weeks of the end of the lease."
)
RECIPE = (
    "Take two eggs, 200 g of flour and a pinch of salt. Beat the eggs first. Bake at 180 degrees "
    "for 25 minutes.\n\nServe with plums or, as in Görlitz, with poppy seed. 🥧 It keeps two days."
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes: it cuts every text, and offsets are easy to check."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index + 2 for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab={START: 0, END: 1, **vocabulary}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=START, eos_token=END, pad_token=END
    )


def save_tiny(
    folder: Path,
    family: str = "llama",
    *,
    width: int = WIDTH,
    depth: int = DEPTH,
    seed: int = 0,
    **changes: object,
) -> str:
    """Write a tiny backbone with random weights that are large enough to matter."""
    torch.manual_seed(seed)
    settings: dict[str, object] = {
        "vocab_size": 258,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": depth,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "initializer_range": 0.15,
        "tie_word_embeddings": True,
        **changes,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    for name, bias in model.named_parameters():
        if name.endswith("_proj.bias"):  # zeros, which nobody would miss
            torch.nn.init.normal_(bias, std=0.15)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def pytest_collection_finish() -> None:
    """Leave what was imported out of collections of garbage: a full one takes 0.3 s otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fixtures() -> Path:
    """The folder of real records."""
    return Path(__file__).parent / "fixtures"


@pytest.fixture(autouse=True)
def tried_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try tokenizers and chat templates in this process, which has imported everything."""

    def here(call: str, *given: object, **limits: object) -> object:
        run = getattr(tokenizer, call.partition(":")[2])
        return json.loads(json.dumps(run(*json.loads(json.dumps(given)))))

    monkeypatch.setattr(tokenizer, "apart", here)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that writes tiny backbones, each once per test session."""
    made: dict[str, str] = {}

    def make(family: str = "llama", **settings: object) -> str:
        key = f"{family} {sorted(settings.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = save_tiny(folder, family, **settings)  # type: ignore[arg-type]
        return made[key]

    return make


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama whose tokenizer has a chat template, with tokens for turns."""
    folder = tmp_path_factory.mktemp("chat")
    save_tiny(folder, vocab_size=260)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN, TURN_END]})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def tiny_gguf(
    tiny_folder: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A tiny Llama as a GGUF file, which is converted in this process, into a cache of its own."""
    monkeypatch.setenv("SEDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf, "_convert_apart", gguf.convert)
    return write_gguf(tiny_folder(vocab_size=260), tmp_path / "tiny.gguf")


@pytest.fixture
def chat_backbone(chat_folder: str) -> Backbone:
    """The same, opened."""
    return open_backbone(chat_folder)


@pytest.fixture(params=FAMILIES)
def any_backbone(request: pytest.FixtureRequest, tiny_folder: Callable[..., str]) -> Backbone:
    """A tiny backbone of each family in turn."""
    return open_backbone(tiny_folder(request.param))


@pytest.fixture
def backbone(tiny_folder: Callable[..., str]) -> Backbone:
    """A tiny Llama."""
    return open_backbone(tiny_folder())


def small_config(encoder: str, **changes: object) -> SedemConfig:
    """A small shape on a tiny backbone: T=16, C=4, so four slots per segment."""
    shape = {"segment_length": 16, "compression": 4, "lora_rank": 4, "lora_alpha": 8, **changes}
    return SedemConfig(encoder=encoder, extract_layers=(3,), inject_layer=2).with_changes(**shape)


@pytest.fixture(scope="session")
def config(tiny_folder: Callable[..., str]) -> SedemConfig:
    """A small shape on the tiny Llama."""
    return small_config(tiny_folder())


@pytest.fixture(scope="session")
def tiny_checkpoint(config: SedemConfig, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four layers of random weights, 512 positions, a byte tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    backbone = open_backbone(config.encoder)
    torch.manual_seed(1)
    model = SeDeM(config, backbone, backbone)
    model.decoder.add_lora(4, 8)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def model(config: SedemConfig, backbone: Backbone) -> SeDeM:
    """An untrained model, the same every time."""
    torch.manual_seed(1)
    return SeDeM(config, backbone, backbone).eval()


@pytest.fixture
def documents() -> list[Document]:
    """A lease and a recipe; the second has characters of several bytes."""
    return [Document("lease.txt", LEASE), Document("recipe.txt", RECIPE)]


@pytest.fixture
def bank(model: SeDeM, documents: list[Document]) -> MemoryBank:
    """The two documents, read by the model."""
    return model.read(documents)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Holds every step of running answers until it is set."""
    go, step = Event(), RunningAnswers.step

    def held(self: RunningAnswers) -> None:
        go.wait(240)
        step(self)

    monkeypatch.setattr(RunningAnswers, "step", held)
    yield go
    go.set()


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    """An object store on this machine; the tests of servers have others of that name."""
    with pytest.MonkeyPatch.context() as patch, running(patch) as found:
        yield found
