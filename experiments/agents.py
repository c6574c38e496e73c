"""Tools for agents: the time of a search, and servers on the same folder and questions."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.system.agents import RANKS
from experiments.system.cells import Cell
from experiments.system.models import guided_model
from experiments.system.scales import SMOL, Scale
from experiments.system.tables import Number, entries, study

NONE_PRINTED = "The paper gives no numbers of this kind."
SERVERS = {"sedem mcp": "sedem mcp", "attemory": "attemory 0.1.3, SmolLM2-135M"}


@study(
    "A search for passages",
    NONE_PRINTED,
    about="{questions} questions to {blocks:,} blocks, medians, after one search as a warm-up.",
)
def passage_search(scale: Scale) -> Iterator[Number]:
    """Milliseconds of the pass over a question, and of the whole search."""
    if SMOL in scale.shipped:
        yield from entries(
            "sedem-smol",
            Cell("passages", variant=guided_model(scale, SMOL)),
            ("pass over the question, ms", "pass_ms"),
            ("search, ms", "search_ms"),
            ("beyond the pass, ms", "beyond_ms"),
        )


@study(
    "Servers of tools on the household papers",
    NONE_PRINTED,
    about="{questions} questions about {files} papers of {characters:,} characters in all. A "
    "result counts if an accepted answer stands in one of the first k.",
)
def tool_servers(scale: Scale) -> Iterator[Number]:
    """Recall, size of five results, and seconds by server."""
    if SMOL not in scale.shipped:
        return
    cell = Cell("tool-servers", variant=guided_model(scale, SMOL))
    for server, label in SERVERS.items():
        if scale.stand_in and server != "sedem mcp":
            continue
        place = f"servers.{server}"
        yield from entries(
            label,
            cell,
            *((f"recall@{k}, %", f"{place}.recall.{k}", 1, 0.01) for k in RANKS),
            ("characters of 5", f"{place}.characters", 0),
            ("start, s", f"{place}.started_s", 2),
            ("first answer, s", f"{place}.first_s", 1),
            ("search, s", f"{place}.search_s", 2),
        )
        if server == "sedem mcp":
            yield Number(label, "after a restart, s", None, cell, f"{place}.again_s")
