"""Putting Paceline somewhere: configuration, command line, local processes, Ray Serve."""
