"""``paceline align``: what drafts, made better at what one target says."""

from __future__ import annotations

import argparse
from types import ModuleType

from cluster.commands import align_draft, align_heads
from cluster.config.flags import BAD_INPUT, FAILED, Parser
from cluster.console import CommandError

ABOUT = "train what drafts on what the target itself says"
DETAILS = """\
The text of a deployment never depends on it; its speed does, and so does what a prompt costs.

  paceline align draft --target ./llama-8b --draft ./llama-1b --data ./texts --out ./llama-1b-aligned
  paceline align medusa --target ./llama-8b --data ./texts --out ./llama-8b-medusa
  paceline align eagle --target ./llama-8b --data ./texts --out ./llama-8b-eagle
"""
INTERRUPTED = 130


KINDS: dict[str, ModuleType | align_heads.HeadCommand] = {
    "draft": align_draft,
    "medusa": align_heads.MEDUSA,
    "eagle": align_heads.EAGLE,
}


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
