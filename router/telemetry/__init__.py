"""What is told of a router: metrics and the view of its cluster."""
