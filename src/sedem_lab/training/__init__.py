"""Training in two stages on transformers.Trainer; a recipe is a YAML file."""
