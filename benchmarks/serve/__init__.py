"""Load against any server with OpenAI's API: what its users wait for, and how contenders compare.

``settings`` says what a run is and ``flags`` how it is asked for, ``requests`` what is sent. ``probe`` asks each server
once, before any load. ``arrivals`` decides when requests are due, ``client`` sends one,
``answer`` reads its stream, ``rounds`` lets contenders take turns. ``figures`` turns requests into
percentiles and ratios, ``report`` shows them.
"""
