"""Memory banks: blocks with their text, search over them, and how they are stored."""
