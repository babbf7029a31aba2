"""A process that turns what a request asks of the text into a grammar, and tries it.

A grammar comes from outside, and compiling one may take hours, gigabytes, or the whole process. So it is first tried
here, where that does no harm: the kernel ends this process when it uses too much memory or processor time, and
:mod:`router.text.grammar_checker` when an answer takes too long all the same. Reads a line of JSON, ``[format, text,
options, tags]``, and writes one, ``[grammar, error]``, until its input ends.

Run as a file, with nothing of the router imported.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

MEMORY_BYTES = 2 << 30
CPU_SECONDS = 1.0
"""For one grammar."""
TRIED_BYTES = 48
"""Length of the text that is made up to see whether the grammar can be followed."""
LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)
"""No wider than a worker's (``engine.shaping.grammar.LIMITS``)."""
TAGS_KEPT = 16
"""Sets of tags whose tokenizers, of some 0.2 MB each, are kept: requests choose them, and memory is bounded."""
NOTHING = "it allows no text at all"
ENDLESS = "it recurses without end: no JSON of finite length fits it"
END, END_TAG = 256, "<end of text>"
"""What ends a text that is made up."""


def main() -> None:
    """Answer until nobody asks any more."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # whose signal nobody handles: it ends the process
        answer = json.dumps(check(*json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()


def check(form: str, text: Any, options: dict[str, Any], tags: list[str]) -> tuple[str, str]:
    """The grammar, and what is wrong with it on one line (empty: nothing). ``tags``: tokens it names, ``<...>``."""
    try:
        if form == "json":
            grammar = LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
        else:
            grammar = grammar_from(form, text)  # type: ignore[arg-type]
        matcher = LLMatcher(tokenizer_of(tuple(tags)), grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            return grammar, one_line(matcher.get_error())
        error = try_out(matcher)
        return grammar, error or ("" if form != "json" or ends(text) else ENDLESS)
    except (ValueError, RecursionError) as error:
        return "", one_line(str(error))


@lru_cache(maxsize=TAGS_KEPT)
def tokenizer_of(tags: tuple[str, ...]) -> LLTokenizer:
    """Of a token for each byte, whose id is that byte, one that ends a text, and these."""
    return LLTokenizer(_Bytes(tags), eos_token=END)  # type: ignore[arg-type]  # by its attributes


class _Bytes:
    """What llguidance asks of a tokenizer. Letters that spell a tag are letters."""

    is_tokenizer_wrapper, eos_token_id, bos_token_id = True, END, None

    def __init__(self, tags: tuple[str, ...]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [tag.encode() for tag in (END_TAG, *tags)]
        self.special_token_ids = range(END, len(self.tokens))

    def __call__(self, text: str) -> list[int]:
        return [*text.encode()]


def try_out(matcher: LLMatcher) -> str:
    """Make up the beginning of a text; what went wrong."""
    rng = random.Random(0)
    for position in range(TRIED_BYTES):
        mask = matcher.compute_logit_bias()
        if matcher.is_error():
            return one_line(matcher.get_error())
        choices = [token for token, open_ in enumerate(mask) if open_ and token != END]
        if not choices:
            return "" if position else NOTHING
        matcher.consume_token(rng.choice(choices))
    return ""


def ends(schema: object) -> bool:
    """Whether any finite JSON fits a schema: the references that surely end are found first, then those above them.

    A chain of references is followed in one round where they stand in its order, or against it.
    """
    ending: set[str] = set()
    unknown = [(reference, _at(schema, reference)) for reference in _references(schema)]
    known = -1
    while known < len(ending):
        known = len(ending)
        for reference, place in unknown:
            if _fits(place, ending):
                ending.add(reference)
        unknown = [(reference, place) for reference, place in reversed(unknown) if reference not in ending]
    return _fits(schema, ending)


def _fits(schema: object, ending: set[str]) -> bool:
    """The same for a schema, given the references that surely end."""
    if not isinstance(schema, dict):
        return True
    parts: list[bool] = []
    if isinstance(reference := schema.get("$ref"), str):
        parts.append(reference in ending or not reference.startswith("#"))
    if isinstance(every := schema.get("allOf"), list):
        parts.append(all(_fits(one, ending) for one in every))
    for name in ("anyOf", "oneOf"):
        if isinstance(some := schema.get(name), list) and some:
            parts.append(any(_fits(one, ending) for one in some))
    return all(parts) and all(_fits(one, ending) for one in _demanded(schema))


def _demanded(schema: Mapping[str, object]) -> Iterator[object]:
    """The schemas of what an object or an array must have."""
    match schema:
        case {"type": "object", "required": list(required)}:
            described = schema.get("properties")
            if isinstance(described, dict):
                yield from (described.get(name) for name in required if isinstance(name, str))
        case {"type": "array", "minItems": int(min_items)}:
            first = schema.get("prefixItems")
            before = first[:min_items] if isinstance(first, list) else []
            yield from before
            if len(before) < min_items:
                yield schema.get("items")


def _references(schema: object) -> list[str]:
    """All references inside a schema to a part of it, each once, in their order."""
    found: dict[str, None] = {}
    waiting = [schema]
    while waiting:
        place = waiting.pop()
        if isinstance(place, dict):
            reference = place.get("$ref")
            if isinstance(reference, str) and reference.startswith("#"):
                found[reference] = None
            waiting += reversed(place.values())
        elif isinstance(place, list):
            waiting += reversed(place)
    return [*found]


def _at(root: object, reference: str) -> object:
    """What a JSON pointer (RFC 6901) in a URI fragment points to; True, which anything fits, if it is none."""
    place = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        elif isinstance(place, dict) and name in place:
            place = place[name]
        else:
            return True
    return place


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
