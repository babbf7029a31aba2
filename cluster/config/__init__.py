"""Settings: what exists, where it is read, what is refused, and what each part is started with."""
