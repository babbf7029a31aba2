"""Drafting for a target with another tokenizer: whose tokens are whose, and what is read instead."""
