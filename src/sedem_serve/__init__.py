"""The server, the tools for agents, and clusters, and their commands."""
