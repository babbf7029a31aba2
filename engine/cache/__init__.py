"""Keys and values of all sequences: who holds which slot, and the tensors themselves."""
