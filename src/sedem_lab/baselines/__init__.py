"""Baselines: other methods behind the same `Reader` interface, one method per file."""
