"""What runs a model: the eager reference and the static fast path."""
