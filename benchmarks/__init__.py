"""Measurements. Every figure is a ratio of things measured side by side in one run, and says what it ran on."""
