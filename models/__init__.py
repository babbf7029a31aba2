"""The bundled model pair: how it is trained, measured and stretched."""
