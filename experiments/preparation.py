"""Time and memory of preparing questions for stage 2. The paper has no such table."""

from __future__ import annotations

from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command, markdown_table
from experiments.system.variants import main_model

SET = "hotpotqa"
WAYS = ("one by one", "together", "from disk")


def cell_of(scale: Scale) -> Cell:
    """The one measurement of a scale."""
    return Cell("preparation", variant=main_model(scale), questions=SET)


def numbers(scale: Scale) -> list[Number]:
    """Milliseconds of an example by way, and bytes of one in the arrays."""
    cell, result = cell_of(scale), []
    for way in WAYS:
        result.append(Number(way, "ms an example", None, cell, f"milliseconds.{way}", digits=2))
        result.append(Number(way, "times sooner", None, cell, f"times_sooner.{way}"))
        if way != WAYS[0]:
            result.append(Number(way, "bytes an example", None, cell, "bytes", digits=0))
    return result


def render(scale: Scale) -> str:
    """The table with the machine and the versions that it was measured on."""
    result = cell_of(scale).read(scale)
    columns, rows = STUDY.rows(scale)
    table = markdown_table([["", *columns], *([way, *map("".join, row)] for way, row in rows)])
    if result is None:
        return table
    machine, versions = result["machine"], result["versions"]
    return (
        f"{machine['processor']}, {machine['cores']} cores; torch {versions['torch']}, "
        f"transformers {versions['transformers']}. {result['examples']} examples of "
        f"{result['tokens']:,} tokens in all. Load of the machine: {result['load_average']:.1f}."
        f"\n\n{table}"
    )


STUDY = Study(
    "preparation",
    "Preparing questions for stage 2",
    numbers,
    "The paper gives no numbers of this kind.",
    render=render,
)

if __name__ == "__main__":
    command(STUDY)()
