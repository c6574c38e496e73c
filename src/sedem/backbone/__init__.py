"""A Hugging Face decoder, opened so that any range of its layers can be run on its own."""
