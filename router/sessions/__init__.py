"""Workers and sessions as a router knows them: who is up, who is chosen, what became of it."""
