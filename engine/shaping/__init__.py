"""What a request does to logits before the draw, and asks of them beside it: penalties, grammars, log-probabilities."""
