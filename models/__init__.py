"""The bundled model pair: how it is trained, measured and stretched."""

import engine as _engine  # noqa: F401 - first of all: it quiets what transformers imports
