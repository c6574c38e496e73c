"""Banks on many machines: built and served by the workers of a Ray cluster."""
