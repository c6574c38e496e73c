"""The bench: times of methods, measured in turn with one clock."""
