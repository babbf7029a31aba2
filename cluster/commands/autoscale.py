"""``paceline simulate --autoscale``: what the autoscaling policies would do under a trace of requests."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from cluster.config.config import Config, RouterConfig, max_replicas_of, min_replicas_of
from cluster.config.flags import BAD_INPUT, add_file, configuration
from cluster.config.pools import DraftConfig, TargetConfig
from cluster.console import CommandError

if TYPE_CHECKING:
    from cluster.autoscaling.simulation import ScalingOutcome, Size
    from cluster.autoscaling.traces import Arrival
    from simulation.costs import Costs
    from speculation.drafting.draft_session import Outcome as Drafted

DETAILS = """\
With --autoscale, instead: how many replicas the autoscaling policies would have run under a trace, why, what
requests would have waited and what it would have cost. The trace is a CSV file with the columns seconds,
prompt_tokens and output_tokens, or one of steady, ramp, burst, day. Bounds and limits come from --config and
--set; without any, pools may grow from 1 to 8 replicas, and drafters go to none:

  paceline simulate --autoscale day
  paceline simulate --autoscale trace.csv --config paceline.yaml --set autoscaling.down_s=300
"""
MAX_REPLICAS = {"target": 8, "draft": 8, "router": 4}
"""Bounds where the configuration leaves all pools as they are."""
TAIL = 2.0
"""Times ``down_s`` that the simulation goes on for after the last request, to see pools shrink."""
STARTS = {"target_start": 60.0, "draft_start": 20.0, "router_start": 5.0}
LONGEST_START = 86400.0
MAX_SCALE = 1000.0
CACHE_TOKENS = 200_000
"""Of a target whose configuration leaves it to the free memory."""


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    group = parser.add_argument_group("autoscaling")
    group.add_argument("--autoscale", metavar="TRACE", help="CSV file, or one of steady, ramp, burst, day")
    group.add_argument("--scale", type=float, default=1.0, metavar="X", help="times the requests of a made-up trace")
    for name, default in STARTS.items():
        about = f"seconds until a new {name.removesuffix('_start')} serves (default: {default:g})"
        group.add_argument(f"--{name.replace('_', '-')}", type=float, default=default, metavar="X", help=about)
    add_file(group)


def run(args: argparse.Namespace, costs: Costs, outcomes: Sequence[Drafted]) -> ScalingOutcome:
    """Simulate."""
    from cluster.autoscaling.fleet import FleetLimits
    from cluster.autoscaling.simulation import Setup, simulate

    config = configuration(args)
    _check(args)
    limits = FleetLimits(
        places=config.target.max_running,
        cache_tokens=config.target.cache_tokens or CACHE_TOKENS,
        step_tokens=config.target.step_tokens,
        prompt_tokens=config.target.prompt_tokens,
        **{name: getattr(args, name) for name in STARTS},
    )
    setup = Setup(
        costs=costs,
        acceptance=sum(outcome.right == 0 for outcome in outcomes) / len(outcomes),
        sizes=sizes(config),
        settings=config.autoscaling,
        limits=limits,
        max_draft=config.speculation.max_draft if config.speculation.enabled else 0,
        tail=TAIL * config.autoscaling.down_s,
        seed=args.seed,
    )
    return simulate(_trace(args), setup)


def sizes(config: Config) -> Mapping[str, Size]:
    """Replicas of each pool, as configured; if all are fixed, within bounds of our own."""
    from cluster.autoscaling.simulation import Size

    pools: dict[str, TargetConfig | DraftConfig | RouterConfig] = {
        "target": config.target,
        "draft": config.draft,
        "router": config.router,
    }
    if not config.autoscales:
        return {name: Size(pool.min_replicas, MAX_REPLICAS[name]) for name, pool in pools.items()}
    return {name: Size(min_replicas_of(pool), max_replicas_of(pool)) for name, pool in pools.items()}


def _trace(args: argparse.Namespace) -> list[Arrival]:
    from cluster.autoscaling.traces import MADE_UP, TraceError, made_up, read

    if args.autoscale in MADE_UP:
        return made_up(args.autoscale, Random(args.seed), args.scale)
    try:
        return read(Path(args.autoscale))
    except TraceError as error:
        raise CommandError(f"--autoscale {error}", BAD_INPUT) from error


def _check(args: argparse.Namespace) -> None:
    bounds = dict.fromkeys(STARTS, (0.0, LONGEST_START)) | {"scale": (0.001, MAX_SCALE)}
    for name, (low, high) in bounds.items():
        if not low <= (value := getattr(args, name)) <= high:
            flag = f"--{name.replace('_', '-')}"
            raise CommandError(f"{flag} {value:g}: must be from {low:g} to {high:g}", BAD_INPUT)
