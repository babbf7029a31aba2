"""Measurements. Every figure is a ratio of things measured side by side in one run, and says what it ran on.

``harness`` is what they share, ``bench`` the command that runs those with a folder of their own; the modules beside it
are measurements run by themselves, as ``python -m benchmarks.NAME``. ``commands`` lists what ``paceline`` gets.
"""

import engine as _engine  # noqa: F401 - first of all: it quiets what transformers imports
