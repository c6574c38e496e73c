"""Commands that make what studies and users need: evaluation data, small checkpoints."""
