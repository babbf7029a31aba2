"""What a request may say: its fields, their bounds, and the valid request that comes of them."""
