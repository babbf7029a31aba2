"""Where this checkout lies, and in it the models that come with it."""

from __future__ import annotations

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
BUNDLED = CHECKOUT / "models"
"""Where the bundled model pair lies."""
