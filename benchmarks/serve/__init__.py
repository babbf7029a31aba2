"""Load against any server with OpenAI's API: what its users wait for, and how contenders compare.

``settings`` says what a run is, ``prompts`` what is sent and ``bodies`` in which form. ``probe`` asks each server once,
before any load. ``arrivals`` decides when requests are due, ``client`` sends one and ``answer`` reads its stream,
``rounds`` lets contenders take turns. ``counters`` reads what servers count of drafts, ``figures`` turns requests into
percentiles, goodput and ratios, ``report`` and ``plots`` show them.
"""
