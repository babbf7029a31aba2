"""How many replicas every pool should have: policies (pure), and what ties them to Ray Serve."""
