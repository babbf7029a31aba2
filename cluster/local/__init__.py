"""One machine: its backend without Ray, and how its cores and GPUs are divided."""
