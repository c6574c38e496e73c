"""Checkpoints: opening, saving, the hub and the model card."""
