"""How true predictions are: ``python -m benchmarks.fit [DIR]`` fits the bundled pair and a stretched one, checks both.

Wanted: the best depth within 1, the speed-up within 15 %. Takes about ten minutes on a quiet machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.fit import main, prompts, report
from benchmarks.fit.settings import FitOptions
from benchmarks.harness.pair import ROOT, Shape, stretched_pair
from cluster.console import say


def pairs() -> list[tuple[str, FitOptions]]:
    """What is fitted: the bundled pair, and the stretched target with both bundled models as drafts."""
    target, draft = (str(ROOT / "models" / name) for name in ("target", "draft"))
    stretched = str(stretched_pair(Shape()).target)
    return [
        ("bundled", _options(target, (draft,))),
        ("stretched", _options(stretched, (target, draft))),
    ]


def _options(target: str, drafts: tuple[str, ...]) -> FitOptions:
    sources = ("none", "lookup")
    asked = tuple(prompts.bundled())
    return FitOptions(target=target, drafts=drafts, sources=sources, prompts=asked, dtype="bfloat16", validate=True)


def run(arguments: Sequence[str]) -> int:
    """Fit both; with a folder as argument, write what was found there."""
    for name, options in pairs():
        say(f"\n{name} pair\n")
        result = main.fit(options)
        report.show(result)
        if arguments:
            folder = Path(arguments[0]) / name
            folder.mkdir(parents=True, exist_ok=True)
            main.write(result, folder)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
