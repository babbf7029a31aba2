"""What drafts in the target's own process: an EAGLE-3 head, a draft model in turn, earlier outputs, sources by name."""
