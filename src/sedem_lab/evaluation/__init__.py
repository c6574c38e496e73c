"""Metrics, the harness that every method goes through, and what models cost."""
