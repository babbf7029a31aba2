"""Attention over the cache, whatever of it a query may see and however it is batched."""
