"""Training, data, baselines and measurements of sedem, and their commands."""
