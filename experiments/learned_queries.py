"""Table query-ksweep: the learned-query compressor by selection budget."""

from __future__ import annotations

from experiments.system import ablation, paper
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import BASE, Variant

QUERIES = Variant("query", ("model.compressor=query",))
BUDGETS: tuple[int | str, ...] = (2, 4, 8, "all")


def numbers(scale: Scale) -> list[Number]:
    """Learned queries and the block compressor at each budget; both are trained alike."""
    result = []
    for k in BUDGETS:
        label = f"K={k}"
        for name, variant in (("learned queries", QUERIES), ("mean pooling", BASE)):
            for questions in ablation.asked(scale, "hotpotqa"):
                cell = ablation.answers(scale, variant, questions, k=k)
                column = f"{scale.sets[questions].title} F1, {name}"
                known = variant is QUERIES and questions == "hotpotqa"
                result.append(Number(label, column, _printed(k) if known else None, cell))
        if "hotpotqa" not in scale.ablation:
            column = "HotpotQA F1, learned queries"
            result.append(Number(label, column, _printed(k), metric=""))
    return result


def _printed(k: int | str) -> float | None:
    blocks = "ALL" if k == "all" else f"K={k}"
    return paper.number("tab:query-ksweep", "token_f1", selected_blocks=blocks)


STUDY = Study("learned_queries", "The learned-query compressor by K (Table query-ksweep)", numbers)

if __name__ == "__main__":
    command(STUDY)()
