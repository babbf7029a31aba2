"""What a target decides: which drafts a session verifies, what is committed, and what waiting is worth."""
