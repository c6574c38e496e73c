"""Ablations: parts of SeDeM left out or exchanged, each trained on one equal budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from experiments.system import paper
from experiments.system.cells import Cell
from experiments.system.models import BASE, NEXT_TOKEN_ALONE, Variant, main_model, without_selector
from experiments.system.scales import Scale
from experiments.system.tables import SCORES, Number, entries, ours, scores, study
from sedem_lab.training.recipe import read_entries

Row = tuple[str, Variant, Mapping[str, float | None]]
"""A label, its variant, and the paper's scores by set and metric, such as "hotpotqa f1"."""
LOSSES = [(f"{kind} loss", f"{kind}.memory", 3) for kind in ("continuation", "recall")]
"""What a model's memory tells of text on held-out windows."""


def ablation(
    scale: Scale, rows: Sequence[Row], metrics: Sequence[str] = ("f1",), only: str | None = None
) -> Iterator[Number]:
    """Scores and losses of answers, and losses of memory; a main model selects, others do not.

    Args:
        only: the one set that the paper uses; at paper scale it is the only one.
    """
    names = {"hotpotqa": "HotpotQA", "qasper": "QASPER"}
    for label, variant, printed in rows:
        left = dict(printed)
        trained = variant if variant.main else without_selector(scale, variant)
        for questions in _asked(scale, only):
            title = scale.sets[questions].title
            own = {m: left.pop(f"{questions} {m}", None) for m in metrics}
            k = scale.sets[questions].k if variant.main else None
            yield from scores(label, title, answers(scale, variant, questions, k), metrics, own)
            loss = Cell("loss", variant=trained, questions=questions, limit=scale.limit)
            yield from entries(label, loss, (f"{title} answer loss", "answer_loss", 3))
        for key, value in left.items():
            questions, metric = key.split()
            column = f"{names[questions]} {SCORES[metric]} (28 layers)"
            yield Number(label, column, value, metric="")
        yield from entries(label, Cell("memory", variant=trained), *LOSSES)


def answers(
    scale: Scale, variant: Variant, questions: str, k: int | str | None = None, shift: int = 0
) -> Cell:
    """Answers of a variant: without selection, or with a budget K if one is given."""
    own = {"questions": questions, "shift": shift, "limit": scale.limit}
    if k is not None:
        return Cell(variant=variant, k=k, **own)
    disabled, control = scale.disabled
    if variant.k and disabled != "all":
        disabled = variant.k
    return Cell(variant=without_selector(scale, variant), k=disabled, control=control, **own)


def studied(scale: Scale, variant: Variant) -> Variant:
    """A variant on the backbone of the paper's depth studies, if that is not the first one."""
    if scale.studied is None or variant.backbone is not None:
        return variant
    return replace(variant, name=f"{variant.name}-{scale.studied}", backbone=scale.studied)


def _asked(scale: Scale, only: str | None) -> tuple[str, ...]:
    return (only,) if only and scale.name == "paper" else scale.ablation


SUBSET = {"paper": ("data.training=[{path: hotpotqa, records: '500:3500'}]", "run.eval_every=188")}
"""Stage-2 overrides of the depth studies by scale: 3,000 training questions of HotpotQA. The first
500 choose among the weights at the end of each epoch of 188 steps."""
DIRECT = ("model.decompressor=none", "model.inject_layer=0")
MLP = (*DIRECT, "model.compressor=mlp")
WITHOUT = ("losses.reconstruct=0",)


@study()
def decompression(scale: Scale) -> Iterator[Number]:
    """Is decompression necessary? (Table decompressor_ablation).

    The variants without a decompressor see as many windows and questions. They learn from the next
    token alone.
    """
    variants = {
        "No decomp. (lin.)": Variant("direct-linear", DIRECT, NEXT_TOKEN_ALONE, WITHOUT),
        "No decomp. (MLP)": Variant("direct-mlp", MLP, NEXT_TOKEN_ALONE, WITHOUT),
        # The paper's is the selective model: its QASPER number is that of the main table.
        "SeDeM": main_model(scale, scale.studied) if scale.name == "paper" else BASE,
    }
    rows = []
    for label, variant in variants.items():
        where, table = {"method": label}, "tab:decompressor_ablation"
        keys = ("hotpotqa", "qasper")
        printed = {f"{key} f1": paper.number(table, f"{key}_f1", **where) for key in keys}
        rows.append((label, studied(scale, variant), printed))
    return ablation(scale, rows)


@study()
def lora(scale: Scale) -> Iterator[Number]:
    """Adapters on the decoder (Table lora_ablation)."""
    decoders = {"frozen": Variant("frozen-decoder", stage2=("model.lora_rank=0",)), "adapted": BASE}
    rows = []
    for name, variant in decoders.items():
        column, sets = f"{name}_decoder_f1", {k: paper.DATASETS[k] for k in ("hotpotqa", "qasper")}
        printed = {
            f"{key} f1": paper.number("tab:lora_ablation", column, dataset=dataset)
            for key, dataset in sets.items()
        }
        rows.append((f"{name} decoder", studied(scale, variant), printed))
    return ablation(scale, rows)


CONTEXT_TOKENS = {
    "those after the window (ours)": BASE,
    "the window's own": Variant("window-tokens", stage1=("losses.context_tokens=window",)),
    "both": Variant("both-tokens", stage1=("losses.context_tokens=both",)),
}


@ours()
def context_tokens(scale: Scale) -> Iterator[Number]:
    """Tokens of the context loss in stage 1.

    It says context-window prediction, and its source names reconstruction of tokens, too. Losses of
    memory after stage 1 alone.
    """
    for label, variant in CONTEXT_TOKENS.items() if scale.name != "paper" else ():
        yield from entries(label, Cell("memory", variant=studied(scale, variant)), *LOSSES)


@study()
def learned_queries(scale: Scale) -> Iterator[Number]:
    """The learned-query compressor by K (Table query-ksweep)."""
    queries = Variant("query", ("model.compressor=query",))
    for k in (2, 4, 8, "all"):
        label, blocks = f"K={k}", "ALL" if k == "all" else f"K={k}"
        printed = {
            metric: paper.number("tab:query-ksweep", column, selected_blocks=blocks)
            for metric, column in (("f1", "token_f1"), ("rouge_l", "rouge_l"))
        }
        # Both are trained alike.
        for name, variant in (("learned queries", queries), ("mean pooling", BASE)):
            for key in _asked(scale, "hotpotqa"):
                known = variant is queries and key == "hotpotqa"
                for metric, value in printed.items():
                    column = f"{scale.sets[key].title} {SCORES[metric]}, {name}"
                    cell = answers(scale, variant, key, k=k)
                    yield Number(label, column, value if known else None, cell, metric)
        for metric, value in printed.items() if "hotpotqa" not in scale.ablation else ():
            yield Number(label, f"HotpotQA {SCORES[metric]}, learned queries", value, metric="")


@study()
def depth(scale: Scale) -> Iterator[Number]:
    """Extraction and injection depth, layers run (Table layer_extraction_injection)."""
    rows, subset = [], SUBSET.get(scale.name, ())
    for row in paper.rows("tab:layer_extraction_injection"):
        # A smaller backbone uses layers at the same relative depth.
        extract, inject = scale.layer(row["l_extract"]), scale.layer(row["l_inject"])
        label = f"{row['l_extract']} to {row['l_inject']} of 28"
        if scale.depth != 28:
            label += f"; {extract} to {inject} of {scale.depth}"
        changes = (f"model.extract_layers=[{extract}]", f"model.inject_layer={inject}")
        if (own := (extract, inject) == scale.layers) and not subset:
            variant = BASE
        else:
            changes = () if own else changes
            variant = studied(scale, Variant(f"layers-{extract}-{inject}", changes, stage2=subset))
        printed = {"hotpotqa f1": row["f1"], "hotpotqa rouge_l": row["rouge_l"]}
        rows.append((label, variant, printed))
    return ablation(scale, rows, ("f1", "rouge_l"), only="hotpotqa")


@study()
def mixed_layers(scale: Scale) -> Iterator[Number]:
    """Mixtures of extraction layers (Table mixed_extraction_layers)."""
    rows = []
    for row in paper.rows("tab:mixed_extraction_layers"):
        printed = {"hotpotqa f1": row["f1"], "hotpotqa rouge_l": row["rouge_l"]}
        label = f"{', '.join(map(str, row['layers']))} of 28, {row['mixing']}"
        if scale.depth != 28:
            layers = ", ".join(str(scale.layer(layer)) for layer in row["layers"])
            label += f"; {layers} of {scale.depth}"
        rows.append((label, _mixture(scale, row["layers"], row["mixing"]), printed))
    yield from ablation(scale, rows, ("f1", "rouge_l"), only="hotpotqa")
    # The learned weights of the first.
    weights = paper.rows("inline_mixed_layer_weights")
    trained = without_selector(scale, _mixture(scale, [row["layer"] for row in weights], "learned"))
    cell = Cell("loss", variant=trained, questions=scale.ablation[0], limit=scale.limit)
    for row in weights:
        label, metric = f"weight of layer {row['layer']} of 28", scale.layer(row["layer"])
        yield Number(label, "weight", float(row["weight"]), cell, f"mixture.{metric}", 3)


def _mixture(scale: Scale, of_28: list[int], mixing: str) -> Variant:
    layers = list(dict.fromkeys(map(scale.layer, of_28)))
    changes = (
        f"model.extract_layers={layers}",
        f"model.inject_layer={scale.layer(10)}",
        f"model.layer_mixing={mixing}",
    )
    name = f"mixed-{'-'.join(map(str, layers))}-{mixing}"
    return studied(scale, Variant(name, changes, stage2=SUBSET.get(scale.name, ())))


T, C, A = 128, 4, 64


@study("The paper gives no numbers: quality falls with C, and grows with T up to 512.")
def granularity(scale: Scale) -> Iterator[Number]:
    """Granularity: segment length at C=4, compression at T=128 (Figure codec_granularity_ablation).

    At T=32 losses are over 32 tokens, elsewhere over 64.
    """
    rows: list[Row] = [(f"T={t}", _of_size(scale, t, C), {}) for t in scale.segment_lengths]
    rows += [(f"C={c}", _of_size(scale, T, c), {}) for c in scale.compressions]
    return ablation(scale, rows, only="qasper")


def _of_size(scale: Scale, segment_length: int, compression: int) -> Variant:
    if (segment_length, compression) == (T, C):
        return BASE
    changes = (f"model.segment_length={segment_length}", f"model.compression={compression}")
    # A recalled passage must fit into a segment.
    after = min(A, segment_length)
    stage1: tuple[str, ...] = (f"text.continuation={after}",)
    stage2: tuple[str, ...] = ()
    # The selected blocks contain the same amount of text, whatever their size.
    k = max(1, 2 * T // segment_length)
    if scale.disabled[0] != "all":
        stage2 = (f"data.budgets=[{k}]", f"data.max_blocks={k + 2}")
    if scale.name == "paper":
        # As many tokens of text for every window width; a text contains fewer long windows.
        text = read_entries(scale.recipe("stage1", scale.backbones[0], ""))["text"]
        width = segment_length + after
        windows, read = text["windows"] * (T + A) // width, text["tokens"] * (1 + width // 512)
        stage1 += (f"text.windows={windows}", f"text.tokens={read}")
    return Variant(f"t{segment_length}-c{compression}", changes, stage1, stage2, k=k)
