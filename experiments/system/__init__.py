"""The code that all studies share."""
