"""The bench: measures times, memory and computed floors of every method in one process."""
