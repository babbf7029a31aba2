"""``paceline fit``: which way to draft is best for a target, a choice of drafts and a kind of traffic.

What the target says is decoded once, plainly. How well each draft and source would have followed it is counted along
that text, what steps cost is measured on workers that serve (:mod:`benchmarks.fit.serving`), and both go into the
simulator (:mod:`benchmarks.fit.predict`), whose word can be checked (:mod:`benchmarks.fit.validate`).
"""
