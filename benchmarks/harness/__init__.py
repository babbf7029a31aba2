"""What all benchmarks have in common; each of them says what it measures, and nothing else.

``options`` is a run's settings, each of which is declared once and is also its flag, and runs it as a command;
``report`` shows what came of it, on the terminal, as JSON and as a page. ``processes`` starts what is measured beside
this process, our own workers too; ``measure`` lets contenders take turns.
"""
