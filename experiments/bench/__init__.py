"""The bench of the studies: `sedem bench` with peers, floors, and scoring of large banks."""
