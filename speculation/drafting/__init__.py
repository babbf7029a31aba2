"""What a drafter decides: where to draft next, and what it pushes when."""
