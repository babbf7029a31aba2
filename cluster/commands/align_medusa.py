"""``paceline align medusa``: heads that let a target draft by itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cluster.config.flags import BAD_INPUT, Parser
from cluster.console import CommandError, complain, say
from cluster.local.threads import usable_cores

ABOUT = "train Medusa heads for a target"
DETAILS = """\
Heads read the target's hidden state and guess the tokens behind its next one; no draft worker is needed. They learn the
target's own distributions on the text of the data; the target stays as it is. What is held out of the data is never
trained on: it says which weights are best, and when to end. A run that is stopped goes on when it is given again. The
folder has the layout of the Medusa authors; serve it with

  paceline up --target ./llama-8b --medusa ./llama-8b-medusa

The defaults suit small models on a CPU. Data are UTF-8 text and JSON lines with "text", "prompt" (and "completion") or
"messages". With --share-output all heads have one output layer, which makes them a quarter as large.
"""
DTYPES = ("auto", "bfloat16", "bf16", "float32", "fp32", "float64", "fp64")
COUNTS: dict[str, tuple[float, float, str]] = {
    "heads": (1, 32, "heads: tokens guessed behind the next one"),
    "layers": (0, 16, "residual blocks of a head"),
    "data_tokens": (1000, 10**10, "most tokens that are taken from the data, from all over it"),
    "steps": (1, 10**7, "steps of training, at most"),
    "minutes": (0.0, 10**6, "minutes in steps, at most; 0: no limit"),
    "batch_tokens": (16, 1 << 22, "tokens of a step"),
    "sequence": (16, 1 << 20, "tokens of a sequence"),
    "rate": (1e-9, 1.0, "peak learning rate"),
    "seed": (0, 2**31, "same seed, same heads"),
}


def add(parser: Parser) -> None:
    """Its flags."""
    flag = parser.add_argument
    flag("--target", required=True, metavar="MODEL", help="folder or hub id of the target")
    flag("--data", type=Path, required=True, nargs="+", metavar="PATH", help="files, or folders of them")
    flag("--out", type=Path, required=True, metavar="DIR", help="folder for the heads")
    defaults = {
        "heads": 4,
        "layers": 1,
        "data_tokens": 1_000_000,
        "steps": 400,
        "minutes": 0.0,
        "batch_tokens": 2048,
        "sequence": 256,
        "rate": 3e-3,
        "seed": 0,
    }
    for name, (_, _, about) in COUNTS.items():
        default = defaults[name]
        text = f"{about} (default: {default:g})" if isinstance(default, float) else f"{about} (default: {default})"
        kind = type(default)
        flag(f"--{name.replace('_', '-')}", type=kind, default=default, metavar="N" if kind is int else "X", help=text)
    flag("--share-output", action="store_true", help="one output layer for all heads")
    flag("--device", default="auto", metavar="TEXT", help="auto, cpu or cuda (default: auto)")
    flag("--dtype", choices=DTYPES, default="auto", help="working precision; weights are fp32 (default: auto)")
    flag("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")
    about = "go on with what an earlier run left in --out, or delete that and start over (default: go on)"
    flag("--resume", action=argparse.BooleanOptionalAction, default=True, help=about)


def run(args: argparse.Namespace) -> int:
    """Train and report."""
    for name, (minimum, maximum, _) in COUNTS.items():
        value = getattr(args, name)
        if not minimum <= value <= maximum:
            raise CommandError(
                f"--{name.replace('_', '-')} must be from {minimum:g} to {maximum:g}, got {value}", BAD_INPUT
            )
    if not 1 <= args.threads <= usable_cores():
        raise CommandError(
            f"--threads must be 1 to {usable_cores()}, the cores usable here, got {args.threads}", BAD_INPUT
        )
    from alignment.data import find_data
    from alignment.encoding import Encoder, tokenizer_of
    from alignment.medusa import HeadTraining, MedusaOptions, load_target, settings_of
    from alignment.workplace import Workplace

    data = find_data(args.data)
    target = load_target(args.target, args.dtype, args.device, args.threads)
    if not args.heads + 1 < args.sequence <= target.context:
        wanted = f"more than --heads ({args.heads}) + 1 and at most the context ({target.context})"
        raise CommandError(f"--sequence must be {wanted}, got {args.sequence}", BAD_INPUT)
    options = MedusaOptions(shared_output=args.share_output, **{name: getattr(args, name) for name in COUNTS})
    place = Workplace(args.out, settings_of(options, target, data), resume=args.resume)
    if place.finished is not None:
        complain(f"paceline: --out {args.out}: done before with the same settings; --no-resume starts over")
        return _tell(place.finished, args.out)
    encoder = Encoder(tokenizer_of(args.target))
    return _tell(HeadTraining(target, encoder, options, place, complain).run(data), args.out)


def _tell(figures: Any, out: Path) -> int:
    from rich.console import Console
    from rich.table import Table

    before, after = figures["before"], figures["after"]
    table = Table(title="how often heads say what the target says, on text held out")
    for column in ("head", "token behind the next", "before", "after"):
        table.add_column(column, justify="right")
    for head, (old, new) in enumerate(zip(before["by_head"], after["by_head"], strict=True)):
        table.add_row(str(head), f"+{head + 1}", f"{old:.3f}", f"{new:.3f}")
    table.add_row("", "in a row", f"{before['run']:.3f}", f"{after['run']:.3f}")
    Console(highlight=False).print(table)
    kept = f"step {figures['best_step']} of {figures['step']}"
    say(f"{out} holds the heads of {kept}: paceline up --target ... --medusa {out}")
    return 0
