"""Extensions of the paper's method."""
