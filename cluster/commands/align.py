"""``paceline align``: what drafts, made better at what one target says.

A draft model (:mod:`.align_draft`), or heads that let a target be drafted for without one: Medusa's and EAGLE's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from cluster.commands import align_draft
from cluster.commands.align_draft import Limits, add_flags, check_flags, done_before
from cluster.config.flags import BAD_INPUT, FAILED, Parser
from cluster.console import CommandError, complain, say

ABOUT = "train what drafts on what the target itself says"
DETAILS = """\
The text of a deployment never depends on it; its speed does, and so does what a prompt costs.

  paceline align draft --target ./llama-8b --draft ./llama-1b --data ./texts --out ./llama-1b-aligned
  paceline align medusa --target ./llama-8b --data ./texts --out ./llama-8b-medusa
  paceline align eagle --target ./llama-8b --data ./texts --out ./llama-8b-eagle
"""
INTERRUPTED = 130


BOTH: dict[str, Limits] = {
    "data_tokens": (1_000_000, 1000, 10**10, "most tokens that are taken from the data, from all over it"),
    "steps": (400, 1, 10**7, "steps of training, at most"),
    "minutes": (0.0, 0, 10**6, "minutes in steps, at most; 0: no limit"),
    "batch_tokens": (2048, 16, 1 << 22, "tokens of a step"),
    "sequence": (256, 16, 1 << 20, "tokens of a sequence"),
    "rate": (3e-3, 1e-9, 1, "peak learning rate"),
    "seed": (0, 0, 2**31, "same seed, same heads"),
}


@dataclass(frozen=True)
class HeadCommand:
    """A command that trains heads."""

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
        add_flags(parser, {**self.counts, **BOTH}, "folder for the heads")
        flag = parser.add_argument
        for name, about in self.switches.items():
            flag(f"--{name}", action="store_true", help=about)
        if self.start:
            flag("--start", default="", metavar="DIR", help=self.start)

    def run(self, args: argparse.Namespace) -> int:
        """Train and report."""
        check_flags(args, {**self.counts, **BOTH})
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
        if figures := done_before(place):
            return self._tell(figures, args.out)
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
        "farther": (0.8, 0, 1, "what a guess counts, relative to the one before it"),
    },
    training=_eagle,
    served_with="--draft-eagle",
    switches={},
    start="folder of an EAGLE-3 head for this target to go on from (default: begin with the target's own weights)",
)
KINDS: dict[str, ModuleType | HeadCommand] = {"draft": align_draft, "medusa": MEDUSA, "eagle": EAGLE}


def add(parser: Parser) -> None:
    """Its flags."""
    kinds = parser.add_subparsers(
        dest="kind", title="what is trained", metavar="{" + ",".join(KINDS) + "}", required=True
    )
    for name, module in KINDS.items():
        about = f"{module.ABOUT}\n\n{module.DETAILS}"
        module.add(kinds.add_parser(name, help=module.ABOUT, description=about, prog=f"paceline align {name}"))


def run(args: argparse.Namespace) -> int:
    """Train, and say what it brought."""
    from alignment.errors import AlignmentError, DataError, Interrupted, SettingsError
    from engine.model import ModelError

    try:
        return int(KINDS[args.kind].run(args))
    except (DataError, SettingsError, ModelError) as error:
        raise CommandError(str(error), BAD_INPUT) from error
    except Interrupted as error:
        raise CommandError(str(error), INTERRUPTED) from error
    except AlignmentError as error:
        raise CommandError(str(error), FAILED) from error
