"""A target worker: verifies drafts and alone commits tokens."""
