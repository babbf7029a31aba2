"""``paceline simulate``: what speed to expect, of a recorded or a made-up set-up."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from cluster.config.config import SpeculationConfig
from cluster.config.flags import Parser, count, flag_of, number, round_trip, values
from cluster.config.pools import AT_DRAFTER, AT_TARGET
from cluster.console import BadInput, stages

if TYPE_CHECKING:
    from cluster.sweep import Simulator, Sweep
    from simulation.costs import Costs
    from speculation.drafting.draft_session import Outcome

ABOUT = "predict decoding speed for other distances, loads and numbers of workers"
DETAILS = """\
A model in virtual time, which takes its decisions with the code that serves. It starts from the records of a
run (workers with --record FILE; best with plain and drafted requests in turn, and no added delay):

  paceline simulate --record target.jsonl --record draft.jsonl --rtt 0,5,20

or from figures:

  paceline simulate --target-step-ms 30 --draft-step-ms 2 --acceptance 0.8 --rtt 20 \\
    --sessions 1,4,16,64 --drafters 1,2,4

An EAGLE-3 head in place of the draft model, at the target or on draft workers that the target sends features:

  paceline simulate --head drafter --target-step-ms 18 --draft-step-ms 1 --rtt 0,5,20 --feature-kb 8

A GPU that pads its steps to classes of rows, and that target and drafter share:

  paceline simulate --rows 16:6.2,32:6.4,64:6.8,128:8.5 --session-ms 0.1 --draft-step-ms 1.1 --launch-ms 0.2 \\
    --shared-device

Flags of a sweep take several values, separated by commas or by repeating the flag; all combinations are run.
"""
MADE_UP = {
    "target_step_ms": (30.0, 0.001, 60_000.0, "a step of the target that computes one token"),
    "verify_slope": (0.01, 0.0, 10.0, "cost of each further token, as a share of that"),
    "draft_step_ms": (2.0, 0.001, 60_000.0, "a step of the drafter, or of a head, that expands one place"),
    "draft_slope": (0.04, 0.0, 10.0, "cost of each further place, as a share of that"),
    "relay_ms": (1.4, 0.0, 60_000.0, "way of a message from worker to worker, without any distance"),
    "launch_ms": (0.0, 0.0, 60_000.0, "what the host does between two steps of a worker"),
    "session_ms": (0.0, 0.0, 60_000.0, "what each session adds to a step of the target"),
    "branching": (1.0, 1.0, 100.0, "how many times as long a step of the target takes whose drafts branch"),
    "acceptance": (0.8, 0.0, 1.0, "chance that the drafter's first choice is right"),
}
"""A made-up set-up: what holds where the flags do not say otherwise, the bounds of each, and what it is."""
HEAD = {
    "retention": (0.98, 0.01, 1.0, "share of its right guesses that stay so with each token it goes on by itself"),
    "fuse_ms": (0.05, 0.0, 60_000.0, "what fusing the hidden states it reads adds to a step of the target"),
    "feature_kb": (8.0, 0.0, 1e6, "KB of features of a token, sent to a head on a draft worker"),
    "feature_gbit": (10.0, 1e-3, 1e6, "Gbit of them a second that get there"),
}
"""The same of an EAGLE head."""
SHARED_CONTENTION, SHARED_DRAFT_CONTENTION = 1.25, 2.3
"""How many times as long steps of a target and of a drafter take beside each other, as measured on an H100 that they
share by time: 4.5B parameters and 6.2 ms a step for the one, the bundled draft and 1.1 ms for the other."""
SWEEP = {
    "rtt": ("0", "added round trip between router and drafters, in ms"),
    "sessions": ("1", "requests at a time"),
    "targets": ("1", "target workers"),
    "drafters": ("1", "draft workers"),
    "schedule": ("trie,sequential,parallel,plain", "how drafting and verification take turns"),
    "draft_length": ("3,5,8", "tokens of a draft under sequential and parallel; the best is shown"),
}
"""What is swept: the values where the flags do not say otherwise, and what they are."""
MAX_COUNT = 4096
"""Sessions, workers, or tokens of a draft."""
RUN = {
    "max_draft": (SpeculationConfig().max_draft, 0, 64, "most draft tokens verified for a session in a step"),
    "tokens": (1000, 1, 10**6, "tokens a session"),
    "request_tokens": (128, 2, 10**6, "tokens of a request, after which the next begins"),
    "jitter": (0.0, 0, 1, "relative spread of steps"),
    "seed": (0, 0, 2**63, "same seed, same figures"),
}
"""The same of what every run of a sweep has in common."""
PLOT_FORMATS = (".png", ".svg", ".pdf")
PIPE_WIDTH = 200


def add(parser: Parser) -> None:
    """Its flags."""
    recorded = parser.add_argument_group("a recorded set-up")
    recorded.add_argument("--record", type=Path, action="append", metavar="FILE", help="records of a worker; repeat")
    made_up = parser.add_argument_group("a made-up set-up")
    for name, (default, _, _, about) in MADE_UP.items():
        made_up.add_argument(flag_of(name), type=float, metavar="X", help=f"{about} (default: {default:g})")
    about = "an EAGLE-3 head drafts, in the target's process or on draft workers, in place of a draft model"
    made_up.add_argument("--head", choices=(AT_TARGET, AT_DRAFTER), help=about)
    for name, (default, _, _, about) in HEAD.items():
        made_up.add_argument(
            flag_of(name), type=float, metavar="X", help=f"with --head: {about} (default: {default:g})"
        )
    about = "chance that a further choice is right where those before it are not (default: 0.6 of --acceptance)"
    made_up.add_argument("--coverage", type=float, metavar="X", help=about)
    about = "numbers of rows that the target's steps are padded to, and what they take, instead of --target-step-ms"
    made_up.add_argument("--rows", action="append", metavar="N:MS", help=about)
    times = f"{SHARED_CONTENTION:g} and {SHARED_DRAFT_CONTENTION:g} times"
    about = f"target and drafter share one GPU: beside each other they take {times} as long, as on an H100"
    made_up.add_argument("--shared-device", action="store_true", default=None, help=about)
    sweep = parser.add_argument_group("what is swept")
    for name, (usual, about) in SWEEP.items():
        sweep.add_argument(flag_of(name), action="append", metavar="X,Y", help=f"{about} (default: {usual})")
    other = parser.add_argument_group("the run and its results")
    for name, (default, _, _, about) in RUN.items():
        kind, metavar = type(default), "N" if isinstance(default, int) else "X"
        text = f"{about} (default: {default:g})"
        other.add_argument(flag_of(name), type=kind, default=default, metavar=metavar, help=text)
    other.add_argument("--csv", type=Path, metavar="FILE", help="write the table there too")
    other.add_argument("--plot", type=Path, metavar="FILE.png", help="draw what was swept")


def run(args: argparse.Namespace) -> int:
    """Simulate and report."""
    from rich.console import Console

    from cluster.sweep import plot, table, write_csv

    sweep = _sweep(args)
    _check_results(args, sweep)
    simulator = _simulator(args)
    with stages() as progress:
        rows = simulator.rows(sweep, progress)
        verdicts = list(simulator.verdicts(sweep))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(table(rows))
    for verdict in verdicts:
        console.print(verdict, soft_wrap=True)
    if args.csv:
        write_csv(rows, args.csv)
    if args.plot:
        plot(rows, sweep, args.plot)
    return 0


# -- flags -------------------------------------------------------------------------------------------------------------


def _sweep(args: argparse.Namespace) -> Sweep:
    from cluster.sweep import PLAIN, SCHEDULES, Sweep

    schedules = ("trie", PLAIN) if args.head else tuple(SCHEDULES)

    def schedule(text: str) -> str:
        if text not in schedules:
            raise ValueError(f"one of {', '.join(schedules)}" + " with --head" * bool(args.head))
        return text

    for name in ("rtt", "drafters") if args.head == AT_TARGET else ():
        if getattr(args, name) is not None:
            raise BadInput(f"{flag_of(name)} is about draft workers: a head at the target needs none")
    names = ("draft_length", "sessions", "targets", "drafters")
    counts = (values(args, name, SWEEP[name][0], partial(count, maximum=MAX_COUNT)) for name in names)
    draft_lengths, sessions, targets, drafters = counts
    rtts = values(args, "rtt", SWEEP["rtt"][0], round_trip)
    given = values(args, "schedule", ",".join(schedules), schedule)
    return Sweep(given, draft_lengths, rtts, sessions, targets, drafters)


def _check_results(args: argparse.Namespace, sweep: Sweep) -> None:
    """What would only fail once all is simulated."""
    from cluster.sweep import axes_of

    for name in ("csv", "plot"):
        file = getattr(args, name)
        if file and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise BadInput(f"--{name} {file}: must be a file in a folder that exists")
    if not args.plot:
        return
    if args.plot.suffix not in PLOT_FORMATS:
        raise BadInput(f"--plot {args.plot}: must end in one of {', '.join(PLOT_FORMATS)}")
    if not find_spec("matplotlib"):
        raise BadInput("--plot needs matplotlib: pip install matplotlib")
    if not axes_of(sweep):
        raise BadInput("--plot needs several values of --rtt, --sessions or --drafters")


def _simulator(args: argparse.Namespace) -> Simulator:
    from cluster.sweep import Simulator
    from simulation.simulate import Bounds, SimulationSettings
    from speculation.messages import Source

    _given(args, RUN)
    costs, outcomes = _recorded(args) if args.record else _made_up(args)
    common = SimulationSettings(
        request_tokens=args.request_tokens,
        sources=frozenset({Source.EAGLE if args.head == AT_TARGET else Source.DRAFT}),
        features=args.head == AT_DRAFTER,
        retention=_given(args, HEAD)["retention"] if args.head else 1.0,
    )
    costs, bounds = replace(costs, jitter=args.jitter), Bounds(drafts_per_session=args.max_draft)
    return Simulator(costs, outcomes, bounds, args.tokens, args.seed, common)


def _within(name: str, value: float, minimum: float, maximum: float) -> None:
    if not minimum <= value <= maximum:
        raise BadInput(f"{flag_of(name)} {value:g}: must be from {minimum:g} to {maximum:g}")


def _made_up(args: argparse.Namespace) -> tuple[Costs, list[Outcome]]:
    from simulation.agreement import made_up
    from simulation.costs import FAR, Costs, Curve

    given = _given(args, MADE_UP | HEAD)
    if args.coverage is not None:
        _within("coverage", args.coverage, 0, 1)
    for name in HEAD:
        if getattr(args, name) is not None and not args.head:
            raise BadInput(f"{flag_of(name)} needs --head: it is for an EAGLE-3 head")
    relay, launch = given["relay_ms"] / 1000, given["launch_ms"] / 1000
    steps, step = _steps(args), given["target_step_ms"] / 1000
    sizes = steps or {1: step, FAR: step * (1 + given["verify_slope"] * (FAR - 1))}
    reading, draft = given["fuse_ms"] / 1000, Curve.straight(given["draft_step_ms"] / 1000, given["draft_slope"])
    costs = Costs(
        verify={1: Curve((rows, seconds, 1.0) for rows, seconds in sizes.items())},
        heads={1: Curve((rows, seconds + reading, 1.0) for rows, seconds in sizes.items())} if args.head else {},
        feature_seconds=given["feature_kb"] * 8e-6 / given["feature_gbit"],
        level=draft if args.head == AT_TARGET else None,
        draft=draft,
        to_target=relay,
        to_draft=relay,
        verify_each=given["session_ms"] / 1000,
        branching=given["branching"],
        row_classes=tuple(sorted(steps)),
        verify_pause=launch,
        draft_pause=launch,
    )
    if args.shared_device:
        costs = replace(costs, contention=SHARED_CONTENTION, draft_contention=SHARED_DRAFT_CONTENTION)
    return costs, made_up(Random(args.seed), given["acceptance"], args.coverage)


def _given(args: argparse.Namespace, known: Mapping[str, tuple[float, float, float, str]]) -> dict[str, float]:
    given = {}
    for name, (default, minimum, maximum, _) in known.items():
        given[name] = default if getattr(args, name) is None else getattr(args, name)
        _within(name, given[name], minimum, maximum)
    return given


def _steps(args: argparse.Namespace) -> dict[int, float]:
    """Seconds of the target's steps by the rows they are padded to; none: they are as large as what they compute."""

    def pair(text: str) -> tuple[int, float]:
        rows, _, step = text.partition(":")
        _, minimum, maximum, _ = MADE_UP["target_step_ms"]
        try:
            seconds = number(step, maximum) / 1000
            if 1000 * seconds >= minimum:
                return count(rows, MAX_COUNT), seconds
        except ValueError:
            pass
        raise ValueError("rows and milliseconds, such as 16:6.2")

    if args.rows is None:
        return {}
    for name in ("target_step_ms", "verify_slope"):
        if getattr(args, name) is not None:
            raise BadInput(f"{flag_of(name)} and --rows say what a step takes; give one of them")
    return dict(values(args, "rows", "", pair))


# -- records -----------------------------------------------------------------------------------------------------------


def _recorded(args: argparse.Namespace) -> tuple[Costs, list[Outcome]]:
    from simulation.recorded import UselessRecord, read

    for name in [*MADE_UP, *HEAD, "head", "coverage", "rows", "shared_device"]:
        if getattr(args, name) is not None:
            raise BadInput(f"{flag_of(name)} belongs to a made-up set-up; --record says it already")
    try:
        return read([line for file in args.record for line in _lines(file)])
    except (UselessRecord, KeyError, TypeError, ValueError) as error:
        unknown = f"not what a worker of this version writes: {type(error).__name__}: {error}"
        why = error if isinstance(error, UselessRecord) else unknown
        raise BadInput(f"--record {' and '.join(map(str, args.record))}: {why}") from error


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of one record. A last line that is cut short, by ``kill -9`` say, is left out."""
    try:
        with file.open(encoding="utf-8") as stream:
            for number, text in enumerate(stream, 1):
                if not text.endswith("\n"):
                    return
                try:
                    line = json.loads(text)
                except ValueError:
                    line = None
                if not isinstance(line, dict) or line.get("role") not in ("target", "draft"):
                    what = f"line {number} is not one that a worker writes with --record"
                    raise BadInput(f"--record {file}: {what}")
                yield line
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise BadInput(f"--record {file}: {reason}; give what a worker wrote with --record") from error
