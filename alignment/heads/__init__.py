"""Training of what drafts from the hidden states of a target: Medusa heads, EAGLE-3 heads."""
