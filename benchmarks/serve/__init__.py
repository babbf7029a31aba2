"""Load against any server with OpenAI's API: what its users wait for, and how contenders compare."""
