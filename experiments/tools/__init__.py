"""Commands that make files for studies and users: evaluation data, small checkpoints."""
