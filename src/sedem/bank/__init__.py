"""Memory banks: blocks with their text, search over blocks, and storage."""
