"""Ours against plain decoding, sequential and PEARL-like drafting, and transformers."""
