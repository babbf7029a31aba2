"""Child processes: started, watched, prepared and told to end."""
