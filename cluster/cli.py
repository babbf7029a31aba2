"""The command line: which commands there are, and how they end.

A command is a module with ``add`` (its flags) and ``run`` (its work); :func:`from_outside` finds those of others.
They import torch, Ray and HTTP libraries only when they run, so that help and mistakes are answered at once. Whatever a
user can get wrong ends in one line on stderr and exit code 2; what fails later in one line and exit code 1.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType

from cluster.commands import align, certs, complete, config, doctor, down, router, simulate, top, up, worker
from cluster.config.environment import CHECKOUT
from cluster.config.flags import Parser
from cluster.config.settings import nearest
from cluster.console import BAD_INPUT, CommandError, complain, let_go, spell_out
from cluster.processes.starting import begin_again
from transport.address import AddressError

COMMANDS: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module
    for module in (up, down, complete, top, worker, router, config, certs, doctor, align, simulate)
}
"""By name, in the order of the help."""

GROUP = "paceline.commands"
"""Entry points of commands from outside the product."""

DESCRIPTION = """\
Serve a large language model with disaggregated speculative decoding: small draft models run ahead of the
target model, and the text is exactly the target's own.

Start here:
  paceline up                          serve the bundled models at http://127.0.0.1:8000
  paceline complete "def fib(n):"      in another terminal: stream a completion from it
  paceline top                         in a third: its workers and sessions, live

With your own models, best with the same tokenizer, from Hugging Face folders:
  paceline up --target ./llama-8b --draft ./llama-1b

By hand, one process each, without Ray:
  paceline worker target --model ./llama-8b --listen 127.0.0.1:7001
  paceline worker draft  --model ./llama-1b --listen 127.0.0.1:7002
  paceline router --target 127.0.0.1:7001 --draft 127.0.0.1:7002 --tokenizer ./llama-8b

When something is wrong:
  paceline doctor
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    spell_out()
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Those from outside are looked for only where they may be meant.
    known = COMMANDS if arguments and arguments[0] in COMMANDS else COMMANDS | from_outside()
    parser, parsers = _parsers(known)
    if not arguments:
        parser.print_help()
        return BAD_INPUT
    if not arguments[0].startswith("-") and arguments[0] not in known:
        near = nearest(arguments[0], known)
        hint = f"did you mean {near!r}?" if near else f"commands are {', '.join(known)}"
        complain(f"paceline: unknown command {arguments[0]!r}; {hint}")
        return BAD_INPUT
    try:
        args, unknown = parser.parse_known_args(arguments)
        parsers[args.command].refuse_unknown(unknown)
        if argv is None and args.command == "worker":
            begin_again()
        return int(known[args.command].run(args))
    except CommandError as error:
        complain(f"paceline: {error}")
        return error.code
    except AddressError as error:
        complain(f"paceline: {error}")
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130
    finally:
        let_go()


def from_outside() -> dict[str, ModuleType]:
    """Commands from outside, by name: by the entry points of what is installed, or those that a checkout declares."""
    if found := entry_points(group=GROUP):
        return {entry.name: entry.load() for entry in found}
    declared = CHECKOUT / "pyproject.toml"
    if not declared.is_file():
        return {}
    listed = tomllib.loads(declared.read_text(encoding="utf-8"))["project"]["entry-points"][GROUP]
    return {name: import_module(module) for name, module in listed.items()}


def _parsers(known: Mapping[str, ModuleType]) -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(prog="paceline", description=DESCRIPTION)
    choices = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND", required=True)
    parsers = {}
    for name, module in known.items():
        about = f"{module.ABOUT}\n\n{module.DETAILS}"
        parsers[name] = choices.add_parser(name, help=module.ABOUT, description=about, prog=f"paceline {name}")
        module.add(parsers[name])
    return parser, parsers


if __name__ == "__main__":
    sys.exit(main())
