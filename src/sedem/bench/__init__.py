"""The bench: times, memory and floors of every method, side by side in one process."""
