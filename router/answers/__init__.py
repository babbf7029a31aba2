"""From committed tokens to what a client reads: choices, chunks, JSON."""
