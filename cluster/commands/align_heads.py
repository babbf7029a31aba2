"""``paceline align medusa`` and ``paceline align eagle``: heads that let a target be drafted for without a model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config.flags import BAD_INPUT, Parser
from cluster.console import CommandError, complain, say
from cluster.local.threads import usable_cores

DTYPES = ("auto", "bfloat16", "bf16", "float32", "fp32", "float64", "fp64")
Limits = tuple[int | float, float, float, str]
"""Default, minimum, maximum, and what it is."""
BOTH: dict[str, Limits] = {
    "data_tokens": (1_000_000, 1000, 10**10, "most tokens that are taken from the data, from all over it"),
    "steps": (400, 1, 10**7, "steps of training, at most"),
    "minutes": (0.0, 0.0, 10**6, "minutes in steps, at most; 0: no limit"),
    "batch_tokens": (2048, 16, 1 << 22, "tokens of a step"),
    "sequence": (256, 16, 1 << 20, "tokens of a sequence"),
    "rate": (3e-3, 1e-9, 1.0, "peak learning rate"),
    "seed": (0, 0, 2**31, "same seed, same heads"),
}


@dataclass(frozen=True)
class HeadCommand:
    """One of them."""

    ABOUT: str
    DETAILS: str
    counts: Mapping[str, Limits]
    """What it takes beside :data:`BOTH`."""
    training: Callable[[argparse.Namespace], tuple[Any, Any]]
    """What its flags ask for, and the class that trains."""
    served_with: str
    """The flag of ``up``."""
    switches: Mapping[str, str]
    """Flags without a value, and what they do."""
    start: str = ""
    """What ``--start`` is for, where there is such a flag."""

    def add(self, parser: Parser) -> None:
        """Its flags."""
        flag = parser.add_argument
        flag("--target", required=True, metavar="MODEL", help="folder or hub id of the target")
        flag("--data", type=Path, required=True, nargs="+", metavar="PATH", help="files, or folders of them")
        flag("--out", type=Path, required=True, metavar="DIR", help="folder for the heads")
        for name, (default, _, _, about) in {**self.counts, **BOTH}.items():
            kind = type(default)
            text = f"{about} (default: {default:g})" if kind is float else f"{about} (default: {default})"
            metavar = "N" if kind is int else "X"
            flag(f"--{name.replace('_', '-')}", type=kind, default=default, metavar=metavar, help=text)
        for name, about in self.switches.items():
            flag(f"--{name}", action="store_true", help=about)
        if self.start:
            flag("--start", default="", metavar="DIR", help=self.start)
        flag("--device", default="auto", metavar="TEXT", help="auto, cpu or cuda (default: auto)")
        flag("--dtype", choices=DTYPES, default="auto", help="working precision; weights are fp32 (default: auto)")
        flag("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")
        about = "go on with what an earlier run left in --out, or delete that and start over (default: go on)"
        flag("--resume", action=argparse.BooleanOptionalAction, default=True, help=about)

    def run(self, args: argparse.Namespace) -> int:
        """Train and report."""
        for name, (_, minimum, maximum, _) in {**self.counts, **BOTH}.items():
            value = getattr(args, name)
            if not minimum <= value <= maximum:
                wanted = f"from {minimum:g} to {maximum:g}, got {value}"
                raise CommandError(f"--{name.replace('_', '-')} must be {wanted}", BAD_INPUT)
        if not 1 <= args.threads <= usable_cores():
            raise CommandError(
                f"--threads must be 1 to {usable_cores()}, the cores usable here, got {args.threads}", BAD_INPUT
            )
        from alignment.data import find_data
        from alignment.encoding import Encoder, tokenizer_of
        from alignment.pair import load_stock, settings_of
        from alignment.workplace import Workplace

        data = find_data(args.data)
        target = load_stock(args.target, args.dtype, args.device, args.threads)
        options, training = self.training(args)
        if not options.reach < args.sequence <= target.context:
            wanted = f"more than the {options.reach} tokens that are guessed, at most the context ({target.context})"
            raise CommandError(f"--sequence must be {wanted}, got {args.sequence}", BAD_INPUT)
        place = Workplace(args.out, settings_of(options, data, target=target), resume=args.resume)
        if place.finished is not None:
            complain(f"paceline: --out {args.out}: done before with the same settings; --no-resume starts over")
            return self._tell(place.finished, args.out)
        encoder = Encoder(tokenizer_of(args.target))
        return self._tell(training(target, encoder, options, place, complain).run(data), args.out)

    def _tell(self, figures: Any, out: Path) -> int:
        from rich.console import Console
        from rich.table import Table

        before, after = figures["before"], figures["after"]
        table = Table(title="how often guesses are what the target says, on text held out")
        for column in ("guess", "before", "after"):
            table.add_column(column, justify="right")
        for number, (old, new) in enumerate(zip(before["by_head"], after["by_head"], strict=True)):
            table.add_row(f"+{number + 1}", f"{old:.3f}", f"{new:.3f}")
        table.add_row("in a row", f"{before['run']:.3f}", f"{after['run']:.3f}")
        Console(highlight=False).print(table)
        kept = f"step {figures['best_step']} of {figures['step']}"
        say(f"{out} holds the heads of {kept}: paceline up --target ... {self.served_with} {out}")
        return 0


def _medusa(args: argparse.Namespace) -> tuple[Any, Any]:
    from alignment.heads.medusa import MedusaOptions, MedusaTraining

    asked = {name: getattr(args, name) for name in MEDUSA.counts.keys() | BOTH.keys()}
    return MedusaOptions(shared_output=args.share_output, **asked), MedusaTraining


def _eagle(args: argparse.Namespace) -> tuple[Any, Any]:
    from alignment.heads.eagle import EagleOptions, EagleTraining

    for name in ("layers", "vocabulary") if args.start else ():
        if getattr(args, name) != EAGLE.counts[name][0]:
            raise CommandError(f"--{name} is that of the head that --start names: leave it out", BAD_INPUT)
    asked = {name: getattr(args, name) for name in EAGLE.counts.keys() | BOTH.keys()}
    return EagleOptions(start=args.start, **asked), EagleTraining


MEDUSA = HeadCommand(
    ABOUT="train Medusa heads for a target",
    DETAILS="""\
Heads read the target's hidden state and guess the tokens behind its next one; no draft worker is needed. They learn the
target's own distributions on the text of the data; the target stays as it is. What is held out of the data is never
trained on: it says which weights are best, and when to end. A run that is stopped goes on when it is given again. The
folder has the layout of the Medusa authors; serve it with

  paceline up --target ./llama-8b --medusa ./llama-8b-medusa

The defaults suit small models on a CPU. Data are UTF-8 text and JSON lines with "text", "prompt" (and "completion") or
"messages". With --share-output all heads have one output layer, which makes them a quarter as large.
""",
    counts={
        "heads": (4, 1, 32, "heads: tokens guessed behind the next one"),
        "layers": (1, 0, 16, "residual blocks of a head"),
    },
    training=_medusa,
    served_with="--medusa",
    switches={"share-output": "one output layer for all heads"},
)
EAGLE = HeadCommand(
    ABOUT="train an EAGLE-3 head for a target",
    DETAILS="""\
The head reads hidden states of several layers of the target and guesses one token after another, from its own states.
It learns the target's own distributions on the text of the data, with as many of its guesses in a row as --depth says
(training-time test); the target stays as it is. What the target writes behind passages held out of the data says which
weights are best, and when to end. A run that is stopped goes on when it is given again. Hidden states are computed as
they are needed and kept nowhere. The folder has the published layout of EAGLE-3; serve it with

  paceline up --target ./llama-8b --draft-eagle ./llama-8b-eagle

The defaults suit small models on a CPU. Data are UTF-8 text and JSON lines with "text", "prompt" (and "completion") or
"messages"; text that the target wrote itself is best. For targets with large vocabularies, --vocabulary 32000 keeps
the output layer small.
""",
    counts={
        "depth": (5, 1, 16, "guesses in a row that are trained"),
        "layers": (1, 1, 16, "layers of the head"),
        "vocabulary": (0, 0, 1 << 24, "tokens the head knows, those that come most often; 0: all"),
        "farther": (0.8, 0.0, 1.0, "what a guess counts, relative to the one before it"),
    },
    training=_eagle,
    served_with="--draft-eagle",
    switches={},
    start="folder of an EAGLE-3 head for this target to go on from (default: begin with the target's own weights)",
)
