"""What the machine gives: memory, threads, and ways to the device."""
