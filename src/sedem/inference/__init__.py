"""The two walks: documents into a bank, a question into an answer."""
