"""From a model's files to a model that was tried: numbers, quantisation, revision, self-test."""
