"""``paceline complete``: stream a completion to the terminal and say what drafting brought.

The speed-up is measured, not estimated: the same request runs once more without drafts, and the texts are compared.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from cluster.config import environment
from cluster.console import BadInput, clean, complain, stages, stderr_console, write

if TYPE_CHECKING:
    from cluster.completion import CompletionRequest, CompletionTally

ABOUT = "stream a completion from a running server to the terminal"
DETAILS = """\
Tokens that a drafter proposed and the target accepted appear in green. The closing line gives tokens/s, the
share of drafts that were accepted, and the speed-up over plain decoding, for which the same request runs once
more without drafts.

  paceline complete "def fib(n):"
  paceline complete "import re" --temperature 0.8 --seed 7 --max-tokens 300
  paceline complete - < prompt.txt > text.txt
"""
DEFAULT_URL = "http://127.0.0.1:8000"


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.add_argument("prompt", nargs="?", help="text to continue; - reads it from standard input")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"where Paceline serves (default: {DEFAULT_URL})")
    parser.add_argument("--model", default="", metavar="NAME", help="which of its models (default: the only one)")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="most tokens (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 (default): most likely text")
    parser.add_argument("--seed", type=int, metavar="N", help="same seed, same text (default: a random one)")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's chat message")
    parser.add_argument("--api-key", metavar="KEY", help="sent to the server (default: the variable OPENAI_API_KEY)")
    parser.add_argument("--no-compare", action="store_true", help="do not run again without drafts to compare")


def run(args: argparse.Namespace) -> int:
    """Stream it."""
    from cluster.completion import CompletionRequest

    if args.prompt is None:
        raise BadInput('give a prompt, such as "def fib(n):", or - to read it from standard input')
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    seed = random.getrandbits(31) if args.seed is None else args.seed
    api_key = environment.api_key() if args.api_key is None else args.api_key
    if not (api_key.isascii() and api_key.isprintable()):
        raise BadInput("the API key must be printable ASCII")
    request = CompletionRequest(prompt, args.max_tokens, args.temperature, seed, args.chat, api_key, args.model)
    show(args.url, request, compare=not args.no_compare)
    return 0


def show(url: str, request: CompletionRequest, *, compare: bool) -> None:
    """Stream to stdout, then the closing line: on the terminal below the text, else on stderr.

    A terminal does not obey what is in the text; a file gets it as it is.
    """
    from cluster.completion import CompletionTally, stream

    console = Console(highlight=False, markup=False) if sys.stdout.isatty() else None
    if console is not None and not request.chat:
        console.out(clean(request.prompt), style="dim", end="", highlight=False)
    tally, plain = CompletionTally(), None
    for text, drafted in stream(url, request, tally):
        if console is None:
            write(text)
        else:
            console.out(clean(text), style="green" if drafted else None, end="", highlight=False)
    write("\n")
    if compare:
        plain = CompletionTally()
        with stages() as report:
            report("decoding again without drafts, to compare")
            for _ in stream(url, request, plain, speculate=False):
                pass
    line = closing_line(tally, plain)
    if request.temperature:
        line += f"; seed {request.seed}"
    if console is not None:
        stderr_console().print(f"[dim]{line}[/dim]", highlight=False)
    else:
        complain(line)


def closing_line(tally: CompletionTally, plain: CompletionTally | None) -> str:
    """What a completion cost and what drafting brought; ``plain`` is the same without drafts."""
    rate = f" at {tally.rate:.1f} tokens/s" if tally.rate else ""
    parts = [f"{tally.tokens} tokens{rate}"]
    if tally.offered:
        parts.append(f"{tally.accepted} of {tally.offered} drafts accepted ({tally.accepted / tally.offered:.0%})")
    else:
        parts.append("no drafts were offered")
    if plain is not None and plain.rate and tally.rate:
        pairs = enumerate(zip(tally.text, plain.text, strict=False))
        at = next((i for i, (one, other) in pairs if one != other), min(len(tally.text), len(plain.text)))
        # Below fp32 a step of several tokens rounds otherwise than a step of one, so near-ties may fall otherwise.
        differ = f"the texts differ from character {at} on, which happens with rounding below fp32"
        same = "same text" if plain.text == tally.text else differ
        speedup = f"{tally.rate / plain.rate:.2f}x the speed of plain decoding"
        parts.append(f"{speedup} ({plain.rate:.1f} tokens/s, measured on the same request without drafts; {same})")
    return "; ".join(parts)
