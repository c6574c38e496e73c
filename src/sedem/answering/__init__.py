"""Answering: a question into an answer with its citations."""
