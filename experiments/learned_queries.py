"""The learned-query compressor by selection budget."""

from __future__ import annotations

from experiments import ablation, paper
from experiments.scales import Scale
from experiments.study import Number, Study, command
from experiments.variants import BASE, Variant

QUERIES = Variant("query", ("model.compressor=query",))
BUDGETS: tuple[int | str, ...] = (2, 4, 8, "all")


def numbers(scale: Scale) -> list[Number]:
    """The learned queries and the block compressor, trained alike, at each budget."""
    result = []
    for k in BUDGETS:
        label = f"K={k}"
        for name, variant in (("learned queries", QUERIES), ("mean pooling", BASE)):
            for questions in ablation.asked(scale, "hotpotqa"):
                cell = ablation.answers(scale, variant, questions, k=k)
                title = scale.sets[questions].title
                known = None
                if variant is QUERIES and questions == "hotpotqa":
                    known = _printed(k)
                result.append(Number(label, f"{title} F1, {name}", known, cell))
        if "hotpotqa" not in scale.ablation:
            column = "HotpotQA F1, learned queries"
            result.append(Number(label, column, _printed(k), metric=""))
    return result


def _printed(k: int | str) -> float | None:
    blocks = "ALL" if k == "all" else f"K={k}"
    return paper.number("tab:query-ksweep", "token_f1", selected_blocks=blocks)


STUDY = Study("learned_queries", "The learned-query compressor by K (Table query-ksweep)", numbers)
app = command(STUDY)

if __name__ == "__main__":
    app()
