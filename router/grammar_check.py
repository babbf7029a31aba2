"""A process that turns what a request asks of the text into a grammar, and tries it.

A grammar comes from outside, and compiling one may take hours, gigabytes, or the whole process. So it is first tried
here, where that does no harm: the kernel ends this process when it uses too much memory or processor time, and
:mod:`router.grammar_checker` when an answer takes too long all the same. Reads a line of JSON, ``[format, text,
options]``, and writes one, ``[grammar, error]``, until its input ends.

Run as a file, with nothing of the router imported.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

MEMORY_BYTES = 2 << 30
CPU_SECONDS = 1.0
"""For one grammar."""
TRIED_BYTES = 48
"""Length of the text that is made up to see whether the grammar can be followed."""
LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)
"""No wider than a worker's (``engine.grammar.LIMITS``)."""
NOTHING = "it allows no text at all"


def main() -> None:
    """Answer until nobody asks any more."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # whose signal nobody handles: it ends the process
        answer = json.dumps(check(tokenizer, *json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()


def check(tokenizer: LLTokenizer, form: str, text: Any, options: dict[str, Any]) -> tuple[str, str]:
    """The grammar, and what is wrong with it on one line (empty: nothing)."""
    try:
        if form == "json":
            grammar = LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
        else:
            grammar = grammar_from(form, text)  # type: ignore[arg-type]
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        return grammar, one_line(matcher.get_error()) if matcher.is_error() else try_out(matcher)
    except (ValueError, RecursionError) as error:
        return "", one_line(str(error))


def try_out(matcher: LLMatcher) -> str:
    """Make up the beginning of a text; what went wrong."""
    rng = random.Random(0)
    for position in range(TRIED_BYTES):
        mask = matcher.compute_logit_bias()
        if matcher.is_error():
            return one_line(matcher.get_error())
        choices = [byte for byte in range(256) if mask[byte]]
        if not choices:
            return "" if position else NOTHING
        matcher.consume_token(rng.choice(choices))
    return ""


def one_line(message: str) -> str:
    """What is wrong, without what llguidance quotes of the grammar."""
    if message.startswith("NoExtension"):
        return NOTHING
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["unknown error"]
    if not lines[0].endswith(":"):
        return lines[0]
    return " ".join((lines[0], next((line for line in lines if line.startswith("error:")), lines[-1])))


if __name__ == "__main__":
    main()
