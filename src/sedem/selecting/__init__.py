"""Selecting blocks for questions (section 3.2): what is asked, scores, and the choice."""
