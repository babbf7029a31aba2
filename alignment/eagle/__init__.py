"""Training of EAGLE-3 heads, which draft from the hidden states of a target."""
