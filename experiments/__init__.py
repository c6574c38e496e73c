"""The studies: one module for each table or figure, listed here in the order of the pages.

`python -m experiments.NAME run` measures what is missing, `table` prints it and `plot` draws it.
The machinery behind them is in `experiments.system`; README.md explains it.
"""

STUDIES = (
    "main_qa",
    "constant_answers",
    "yes_no",
    "selection_budget",
    "operating_points",
    "controls",
    "ruler",
    "decompression",
    "learned_queries",
    "depth",
    "mixed_layers",
    "lora",
    "granularity",
    "transfer",
    "effective_rank",
    "decoder_length",
    "parameters",
    "parameter_overhead",
    "flops",
    "efficiency",
    "method_costs",
    "training_curves",
    "learning_rates",
    "shipped_baselines",
    "shipped_model",
    "shipped_beside_paper",
    "shipped_command",
    "shipped_memory",
    "shipped_training",
    "answer_limit",
    "slot_types",
    "coarse_search",
    "confidence",
    "performance",
    "batches",
    "memories",
)
