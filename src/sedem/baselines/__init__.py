"""Other methods on the same bench: one method a file, each a Reader."""
