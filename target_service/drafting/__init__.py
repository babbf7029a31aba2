"""What drafts in the target's own process: Medusa heads, a draft model in turn, earlier outputs, sources by name."""
