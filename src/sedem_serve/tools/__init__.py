"""Banks as tools of agents and of other programs."""
