"""A draft worker: runs ahead of the target and pushes what it expects the target to say."""
