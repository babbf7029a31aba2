"""The engine alone: how close its steps come to the memory's pace, and what many requests at once gain."""
