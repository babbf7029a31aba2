"""What the commands of ``paceline align`` have in common: flags, their bounds, and a run that was done before."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.config.flags import BAD_INPUT, Parser
from cluster.console import CommandError, complain
from cluster.local.threads import usable_cores

if TYPE_CHECKING:  # it brings torch
    from alignment.workplace import Workplace

DTYPES = ("auto", "bfloat16", "bf16", "float32", "fp32", "float64", "fp64")
"""16-bit floats without bfloat16's range lose gradients."""
Limits = tuple[int | float, float, float, str]
"""Default, minimum, maximum, and what it is."""


def add_flags(parser: Parser, numbers: Mapping[str, Limits], out: str) -> None:
    """Those of all. ``numbers``: flags that take one; ``out``: what ``--out`` is."""
    flag = parser.add_argument
    flag("--target", required=True, metavar="MODEL", help="folder or hub id of the target")
    flag("--data", type=Path, required=True, nargs="+", metavar="PATH", help="files, or folders of them")
    flag("--out", type=Path, required=True, metavar="DIR", help=out)
    for name, (default, _, _, about) in numbers.items():
        text = about if "(default:" in about else f"{about} (default: {default})"
        metavar = "N" if isinstance(default, int) else "X"
        flag(f"--{name.replace('_', '-')}", type=type(default), default=default, metavar=metavar, help=text)
    flag("--device", default="auto", metavar="TEXT", help="auto, cpu or cuda (default: auto)")
    flag("--dtype", choices=DTYPES, default="auto", help="working precision; weights are fp32 (default: auto)")
    flag("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")
    about = "go on with what an earlier run left in --out, or delete that and start over (default: go on)"
    flag("--resume", action=argparse.BooleanOptionalAction, default=True, help=about)


def check_flags(args: argparse.Namespace, numbers: Mapping[str, Limits]) -> None:
    """Raises CommandError for a number out of bounds, or more threads than cores."""
    for name, (_, minimum, maximum, _) in numbers.items():
        value = getattr(args, name)
        if not minimum <= value <= maximum:
            flag = f"--{name.replace('_', '-')}"
            raise CommandError(f"{flag} must be from {minimum} to {maximum}, got {value}", BAD_INPUT)
    cores = usable_cores()
    if not 1 <= args.threads <= cores:
        raise CommandError(f"--threads must be 1 to {cores}, the cores usable here, got {args.threads}", BAD_INPUT)


def done_before(place: Workplace) -> Mapping[str, Any] | None:
    """The figures of a run of the same settings that came to its end in this folder, which is said."""
    if place.finished is not None:
        complain(f"paceline: --out {place.out}: done before with the same settings; --no-resume starts over")
    return place.finished
