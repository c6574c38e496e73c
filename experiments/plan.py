"""The plan for banks of up to 10^12 tokens: measured costs of one core, multiplied by counts."""

from __future__ import annotations

import math

from experiments.selection import made_banks
from experiments.system.bench import BATCHES, bench_cells, contexts_of
from experiments.system.scales import SHIPPED, Scale
from experiments.system.search import BANK_SIZES
from experiments.system.tables import NOT_RUN, Number, made_on, markdown_table, ours
from sedem.backbone.loading import read_config
from sedem.bank.codes import SIGNS
from sedem.checkpoint.folder import EXTRA_ENTRIES
from sedem.config import SedemConfig
from sedem.durable_files import bytes_text
from sedem.selecting.select import CANDIDATES, COARSE_FROM, WORD_CANDIDATES
from sedem.tensors import BFLOAT16, vector_bytes

SIZES = tuple(10**power for power in range(7, 13))
"""Sizes of the banks, in tokens."""
MANY = 10**7
"""Tokens of each of many banks; a question searches one of them."""
DEVICES, MEMORY_GB, LOAD, DAYS = 16, 64, 0.7, 7
"""Assumed, not measured: cores and GB for keys of a machine, and how much and long it works."""


def _costs(scale: Scale) -> dict[str, Number]:
    """The measured costs of one core by name."""
    model, bench = next(iter(bench_cells(scale).items()))
    batches, made = bench_cells(scale, "batches")[model], made_banks(scale)
    row, blocks = f"results.sedem.{contexts_of(scale, 'batches')[0]}", max(BANK_SIZES[scale.name])
    text = f"results.full-context.{min(contexts_of(scale, 'bench'))}.stored_bytes_per_token"
    answered, place = max(BATCHES[scale.name]), f"sizes.{blocks}.cpu_ms_per_question"
    candidates = f"scoring {CANDIDATES + WORD_CANDIDATES:,} candidates, ms"
    rows = {
        "read": (batches, f"{row}.build_tok_s.median", "reading, tokens a second", 0),
        "text": (bench, text, "text, bytes a token", 1),
        "answers": (
            *(batches, f"{row}.batches.{answered}.questions_per_s.median"),
            *(f"answers a second, {answered} questions at once", 2),
        ),
        "exact": (made, f"{place}.exact", f"scoring all keys of {blocks:,} blocks, ms", 1),
        "codes": (made, f"{place}.codes", f"comparing codes of {blocks:,} blocks, ms", 1),
        "words": (made, f"{place}.words", f"finding words in {blocks:,} blocks, ms", 1),
        "candidates": (made, "candidates.int8.cpu_ms", candidates, 1),
    }
    return {
        name: Number("one core", title, None, cell, metric, digits)
        for name, (cell, metric, title, digits) in rows.items()
    }


def _plan(scale: Scale) -> str:
    """The measured costs with their machines, the assumptions, and the table."""
    shown = _costs(scale) if scale.name == "nano" else {}
    if not shown or any(number.ours(scale) is None for number in shown.values()):
        return NOT_RUN
    values = {name: number.value(scale) for name, number in shown.items()}
    costs = [["one core, sedem-nano", "measured", "on"]]
    for number in shown.values():
        assert number.cell is not None
        made = made_on(number.cell.read(scale) or {})
        costs.append([number.column, *number.lines(scale), made])
    assumed = (
        f"Assumed, not measured: machines of {DEVICES} cores with {MEMORY_GB} GB for keys, busy "
        f"{LOAD:.0%} of the time; a bank is read within {DAYS} days. Blocks are full."
    )
    head = ["tokens", "blocks", "slots", "slots, int8", "codes", "text", "core days to read"]
    head += ["machines", "search", "core s a question, exact", "coarse"]
    head += ["machines for 1 question a second"]
    rows = [_row(values, tokens, tokens) for tokens in SIZES]
    many = _row(values, SIZES[-1], MANY)
    many[0] = f"{many[0]} in banks of {_power(MANY)}"
    machines = math.ceil(10_000 / values["answers"] / LOAD / DEVICES)
    after = (
        f"{machines:,} more machines answer 10,000 questions a second, from a bank of any size: "
        f"an answer takes {1 / values['answers']:.2g} s of a core."
    )
    return "\n\n".join([markdown_table(costs), assumed, markdown_table([head, *rows, many]), after])


def _row(costs: dict[str, float], tokens: int, searched: int) -> list[str]:
    """A bank of some tokens, or many banks of which a question searches one."""
    config = SedemConfig.load(SHIPPED, extra=EXTRA_ENTRIES)
    width, slots = read_config(str(SHIPPED / "backbone")).hidden_size, config.slots_per_block
    of_key = config.selector_heads * (config.selector_dim or width // config.selector_heads)
    blocks, of_one = (-(-count // (slots * config.compression)) for count in (tokens, searched))
    # As selectors keep them on a CPU: all keys in float32, or codes.
    keys = {"exact": 4 * slots * of_key, "coarse": SIGNS * of_key // 8}
    sizes = [blocks * slots * vector_bytes(width, dtype) for dtype in (BFLOAT16, "int8")]
    sizes += [blocks * keys["coarse"], round(tokens * costs["text"])]
    share = of_one / max(BANK_SIZES["nano"])
    # The words that are read stand in a limited number of blocks.
    coarse = share * costs["codes"] + costs["words"] + costs["candidates"]
    seconds = {"exact": share * costs["exact"] / 1e3, "coarse": coarse / 1e3}
    search = "coarse" if of_one > COARSE_FROM else "exact"
    days = tokens / costs["read"] / 86400
    # A question must be scored within a second, and every block's keys are in some memory.
    needed = max(seconds[search] / LOAD / DEVICES, blocks * keys[search] / (MEMORY_GB * 1e9))
    machines = f"{math.ceil(days / DEVICES / DAYS):,}"
    spent = (f"{second:,.3g}" for second in seconds.values())
    start = _power(tokens), f"{blocks:,}", *map(bytes_text, sizes), f"{days:,.3g}", machines
    return [*start, search, *spent, f"{math.ceil(needed):,}"]


def _power(tokens: int) -> str:
    return f"1e{round(math.log10(tokens))}"


@ours(render=_plan)
def plan(scale: Scale) -> list[Number]:
    """What banks of up to 10^12 tokens take."""
    # The plan is about sedem-nano on one core.
    return [] if scale.name == "paper" else [*_costs(scale).values()]
