"""``paceline bench``: the measurements, on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from cluster.console import CommandError
from cluster.flags import BAD_INPUT, FAILED, Parser
from cluster.threads import usable_cores

ABOUT = "measure decoding speed on this machine, against other ways to decode"
DETAILS = """\
Everything is measured side by side in one run, with models built from the bundled ones or of random weights. Keep the
machine quiet meanwhile.

  paceline bench engine --quick
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
    benches = parser.add_subparsers(dest="bench", title="benchmarks", metavar="{engine,speculation}", required=True)
    _add_engine(benches)
    _add_speculation(benches)


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    # What would only fail when all is measured is refused before anything is.
    if args.json and not args.json.absolute().parent.is_dir():
        raise CommandError(f"--json {args.json}: no such folder", BAD_INPUT)
    if args.quick and args.out:
        raise CommandError("--out belongs to a full run; with --quick, use --json", BAD_INPUT)
    prepare: Callable[[argparse.Namespace], Callable[[], int]] = args.prepare
    measure = prepare(args)
    from benchmarks.workers import WorkerFailed
    from router.generation import GenerationError

    try:
        return measure()
    except (WorkerFailed, GenerationError, TimeoutError) as error:
        raise CommandError(f"the benchmark ended early: {error or 'a worker did not answer'}", FAILED) from error


def _add_engine(benches: argparse._SubParsersAction[Parser]) -> None:
    about = "the target worker's engine: its steps, its batches and its memory, and transformers"
    details = "The quick run takes about four minutes, the full one about ten"
    bench = benches.add_parser("engine", help=about, description=f"Measures {about}.\n\n{details}.")
    bench.set_defaults(prepare=_engine)
    flag = bench.add_argument
    flag("--quick", action="store_true", help="fewer rounds, no requests through a router; writes no folder")
    flag("--json", type=Path, metavar="FILE", help="write the figures there too")
    flag("--out", type=Path, metavar="DIR", help="folder of a full run (default: benchmarks/results/DATE-engine)")
    flag("--hidden", type=int, default=2048, metavar="N", help="hidden size of the model (default: 2048)")
    flag("--layers", type=int, default=4, metavar="N", help="layers of the model (default: 4)")
    flag("--threads", type=int, default=1, metavar="N", help="cores, and threads of a step (default: 1)")


def _add_speculation(benches: argparse._SubParsersAction[Parser]) -> None:
    about = "speculative against plain decoding, other ways to draft, and transformers"
    details = "The full run takes an hour or more, the quick one less than ten minutes; building the pairs adds minutes"
    bench = benches.add_parser("speculation", help=about, description=f"Measures {about}.\n\n{details} the first time.")
    bench.set_defaults(prepare=_speculation)
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


def _engine(args: argparse.Namespace) -> Callable[[], int]:
    """Check its flags; return what measures."""
    from benchmarks.engine_settings import HIDDEN_MULTIPLE, Options, Shape

    if args.hidden < HIDDEN_MULTIPLE or args.hidden % HIDDEN_MULTIPLE:
        raise CommandError(f"--hidden must be a multiple of {HIDDEN_MULTIPLE}, got {args.hidden}", BAD_INPUT)
    if args.layers < 1:
        raise CommandError(f"--layers must be at least 1, got {args.layers}", BAD_INPUT)
    cores = usable_cores()
    if not 1 <= args.threads <= cores:
        raise CommandError(f"--threads must be 1 to {cores}, the cores usable here, got {args.threads}", BAD_INPUT)
    options = Options(
        quick=args.quick,
        json=args.json,
        out=args.out or RESULTS / f"{_today()}-engine",
        shape=Shape(args.hidden, args.layers),
        threads=args.threads,
    )
    from benchmarks import engine

    return partial(engine.main, options)


def _speculation(args: argparse.Namespace) -> Callable[[], int]:
    """Check its flags; return what measures."""
    prompts, bursts = (QUICK_PROMPTS, QUICK_BURSTS) if args.quick else (PROMPTS, BURSTS)
    prompts = prompts if args.prompts is None else args.prompts
    bursts = bursts if args.bursts is None else args.bursts
    for name, value, least in (("--prompts", prompts, 1), ("--bursts", bursts, 1), ("--tokens", args.tokens, TOKENS)):
        if value < least:
            raise CommandError(f"{name} must be at least {least}, got {value}", BAD_INPUT)
    if not args.quick and not find_spec("matplotlib"):
        raise CommandError("a full run draws plots, for which matplotlib is needed: pip install matplotlib", BAD_INPUT)
    from benchmarks import speculation
    from benchmarks.settings import Options

    options = Options(
        quick=args.quick,
        json=args.json,
        out=args.out or RESULTS / _today(),
        prompts=prompts,
        bursts=bursts,
        tokens=args.tokens,
        dtype=args.dtype,
        hidden=args.hidden,
        layers=args.layers,
    )
    return partial(speculation.main, options)


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
