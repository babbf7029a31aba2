"""The commands of ``paceline``, one module each."""
