"""Load against any server with OpenAI's API: what its users wait for, and how contenders compare.

``settings`` says what a run is and how it is asked for. ``rounds`` looks at each server before any load, lets
contenders take turns and decides when requests are due, ``client`` sends one and reads its answer. ``report`` turns
requests into percentiles and ratios, and shows them.
"""
