"""Load against any server with OpenAI's API: what its users wait for, and how contenders compare.

``settings`` says what a run is and how it is asked for. ``probe`` asks each server once, before any load. ``rounds``
lets contenders take turns and decides when requests are due, ``client`` sends one and reads its answer.
``figures`` turns requests into percentiles and ratios, ``report`` shows them.
"""
