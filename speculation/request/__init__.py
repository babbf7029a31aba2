"""The router's side: the life of one request, and what it does when workers are lost."""
