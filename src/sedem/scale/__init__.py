"""Many machines: banks built and served by the workers of a Ray cluster."""
