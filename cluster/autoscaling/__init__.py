"""How many replicas every pool should have: policies (pure), their simulation, and what ties them to Ray Serve."""
