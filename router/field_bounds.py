"""The bounds and defaults of request fields, each named once: parsing obeys them and the field table shows them."""

from __future__ import annotations

import re

COMPLETION_MAX_TOKENS = 16
"""Default of ``max_tokens`` for completions, as in OpenAI's API. Chat takes the rest of the context."""
MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-6
"""Below this logits divided by it overflow; 0 itself means greedy."""
MAX_TOP_K = 2**31 - 1
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
MAX_PENALTY = 2.0
"""Of presence and frequency penalties, either way."""
LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-4, 100.0
MAX_BIAS = 100.0
"""Either way."""
MAX_BIASED = 1024
"""Entries of ``logit_bias``."""
MAX_ALLOWED = 16_384
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_DRAFT_DEPTH = 64

ROLES = ("system", "developer", "user", "assistant", "tool")
"""``developer`` is OpenAI's newer name of ``system``, which is what chat templates know."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_TOOLS = 128
MAX_CHOICES = 1024
"""Of ``guided_choice``."""
FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

MOST_MESSAGES = 2048
"""As in OpenAI's API."""
LEAST_TIMEOUT, MOST_TIMEOUT = 0.001, 86400.0
"""Seconds that a request may ask for."""
MAX_LABEL = 512
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
SERVICE_TIERS = ("auto", "default")
CACHE_MODES = ("implicit", "explicit")
CACHE_TTLS = ("30m", "12h")
CACHE_RETENTIONS = ("in-memory", "in_memory", "24h")
