"""The HTTP side: endpoints, keys, limits, and what is written down of a request."""
