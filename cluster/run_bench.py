"""``paceline bench``: the measurements, on this machine."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from cluster.console import CommandError
from cluster.flags import BAD_INPUT, FAILED, Parser

ABOUT = "measure decoding speed on this machine, against other ways to decode"
DETAILS = """\
Everything is measured side by side in one run, with a pair of models built from the bundled ones. Keep the machine
quiet meanwhile.

  paceline bench speculation --quick --json figures.json
  paceline bench speculation
"""
QUICK_PROMPTS, PROMPTS = 8, 10
QUICK_BURSTS, BURSTS = 2, 3
TOKENS = 8
"""Fewest new tokens a prompt; the first do not count."""
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def add(parser: Parser) -> None:
    """Its flags."""
    benches = parser.add_subparsers(dest="bench", title="benchmarks", metavar="{speculation}", required=True)
    about = "speculative against plain decoding, other ways to draft, and transformers"
    details = "The full run takes an hour or more, the quick one less than ten minutes; building the pairs adds minutes"
    bench = benches.add_parser("speculation", help=about, description=f"Measures {about}.\n\n{details} the first time.")
    flag = bench.add_argument
    flag("--quick", action="store_true", help="only the settings for which there are goals; writes no folder")
    flag("--json", type=Path, metavar="FILE", help="write the figures there too")
    flag("--out", type=Path, metavar="DIR", help="folder of a full run (default: benchmarks/results/DATE)")
    flag("--prompts", type=int, metavar="N", help=f"prompts a setting (default: {PROMPTS}; quick: {QUICK_PROMPTS})")
    bursts = f"rounds with several requests at once (default: {BURSTS}; quick: {QUICK_BURSTS})"
    flag("--bursts", type=int, metavar="N", help=bursts)
    flag("--tokens", type=int, default=96, metavar="N", help="new tokens a prompt (default: 96)")
    flag("--dtype", default="bfloat16", metavar="TEXT", help="number format (default: bfloat16)")
    flag("--hidden", type=int, default=1024, metavar="N", help="hidden size of the stretched target (default: 1024)")
    flag("--layers", type=int, default=24, metavar="N", help="layers of the stretched target (default: 24)")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    prompts, bursts = (QUICK_PROMPTS, QUICK_BURSTS) if args.quick else (PROMPTS, BURSTS)
    prompts = prompts if args.prompts is None else args.prompts
    bursts = bursts if args.bursts is None else args.bursts
    for name, value, least in (("--prompts", prompts, 1), ("--bursts", bursts, 1), ("--tokens", args.tokens, TOKENS)):
        if value < least:
            raise CommandError(f"{name} must be at least {least}, got {value}", BAD_INPUT)
    # What would only fail when all is measured is refused before anything is.
    if args.json and not args.json.absolute().parent.is_dir():
        raise CommandError(f"--json {args.json}: no such folder", BAD_INPUT)
    if args.quick and args.out:
        raise CommandError("--out belongs to a full run; with --quick, use --json", BAD_INPUT)
    if not args.quick and not find_spec("matplotlib"):
        raise CommandError("a full run draws plots, for which matplotlib is needed: pip install matplotlib", BAD_INPUT)
    from benchmarks import speculation
    from benchmarks.settings import Options
    from benchmarks.workers import WorkerFailed
    from router.generation import GenerationError

    options = Options(
        quick=args.quick,
        json=args.json,
        out=args.out or RESULTS / datetime.now(UTC).date().isoformat(),
        prompts=prompts,
        bursts=bursts,
        tokens=args.tokens,
        dtype=args.dtype,
        hidden=args.hidden,
        layers=args.layers,
    )
    try:
        return speculation.main(options)
    except (WorkerFailed, GenerationError, TimeoutError) as error:
        raise CommandError(f"the benchmark ended early: {error or 'a worker did not answer'}", FAILED) from error
