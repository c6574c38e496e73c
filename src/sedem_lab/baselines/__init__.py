"""Baselines: other methods behind the same `DocumentReader` interface, one method per file."""
