"""Engines that run a model: the eager reference and the static fast path."""
