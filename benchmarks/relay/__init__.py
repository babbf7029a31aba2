"""What the relay between a target and a drafter takes: real streams through a real router, and nothing computed."""
