"""The Ray backend: what is deployed, where it is placed, and how it is started."""
