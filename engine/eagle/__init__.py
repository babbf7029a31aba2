"""EAGLE-3 heads: what a checkpoint says, the head as plain torch, and how it is read."""
