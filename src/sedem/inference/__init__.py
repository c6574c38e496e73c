"""Reading documents into a bank, answering questions from it, and checkpoints."""
