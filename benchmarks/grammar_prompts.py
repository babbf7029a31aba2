"""Requests that repeat, their answers held by a grammar, for :mod:`benchmarks.drafting`.

A small model asked for rows, or for a file with an edit, falls into a loop or drifts away, and either would flatter or
belie the figures. So a grammar holds its answers to what a model that follows instructions would say: the rows of the
table that it was given, the file but for the names that the edit is about. What is left open, a remark in each row and
those names, the model says itself. No contender drafts from the grammar: forced text is decoded, and drafted, like any
other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from router.schema.request_schema import Body
from router.schema.structured import text_grammar


@dataclass(frozen=True, slots=True)
class GrammarPrompt:
    """What is asked, and the grammar of the answer; empty: none."""

    prompt: str
    grammar: str = ""


_TABLES = ("sensors", "books", "stations", "rooms", "boats", "trees", "parcels", "machines")
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "lagoon", "maple", "oriel")
ROWS = 5
_SUBJECTS = ("account", "invoice", "student", "vehicle", "recipe", "ticket", "player", "garden")
_FILE = '''\
class {Name}Store:
    """Keeps every {name} by its number."""

    def __init__(self, path):
        self.path = path
        self.{name}s = {{}}

    def add_{name}(self, number, {name}):
        if number in self.{name}s:
            raise KeyError(number)
        self.{name}s[number] = {name}
        return {name}

    def remove_{name}(self, number):
        if number not in self.{name}s:
            raise KeyError(number)
        return self.{name}s.pop(number)

    def find_{name}(self, number, default=None):
        return self.{name}s.get(number, default)
'''
_HOLE = "[a-z]{3,8}"
_FUNCTIONS = ("flatten", "median", "is_prime", "slugify", "transpose", "chunked", "gcd", "word_count")


def rows() -> list[GrammarPrompt]:
    """A table of its own each, and the same as JSON."""
    return [_table(name, Random(number)) for number, name in enumerate(_TABLES)]


def _table(name: str, rng: Random) -> GrammarPrompt:
    lines, pattern = ["identifier,label,amount,available"], []
    for _ in range(ROWS):
        values = rng.randint(100, 999), "-".join(rng.sample(_WORDS, 2)), rng.randint(10, 99), rng.random() < 0.5
        lines.append(",".join(map(str, values)))
        row = dict(zip(lines[0].split(","), values, strict=True)) | {"remark": "?"}
        pattern.append(re.escape(json.dumps(row)).replace(r"\?", "[a-z ]{4,12}"))
    table = "\n".join(lines)
    prompt = f"# Our {name}, a remark for each:\n{table}\n\n# The same as JSON:\n"
    return GrammarPrompt(prompt, _held("\n".join(pattern)))


def edits() -> list[GrammarPrompt]:
    """A file, and the same with other names in it."""
    found = []
    for subject in _SUBJECTS:
        file = _FILE.format(name=subject, Name=subject.capitalize())
        pattern = re.sub(f"(add|find|remove)_{subject}", rf"\1_{_HOLE}", re.escape(file))
        prompt = f"# Before:\n{file}\n\n# The same, with shorter names of the methods:\n"
        found.append(GrammarPrompt(prompt, _held(pattern)))
    return found


def functions() -> list[GrammarPrompt]:
    """Code as it comes, in no form: for comparison."""
    return [GrammarPrompt(f'def {name}(values):\n    """') for name in _FUNCTIONS]


KINDS: dict[str, Callable[[], Sequence[GrammarPrompt]]] = {"rows": rows, "edits": edits, "free code": functions}


def _held(pattern: str) -> str:
    """The grammar of it. Of what ``re.escape`` escapes, spaces and line ends need none anywhere else."""
    plain = pattern.replace("\\ ", " ").replace("\\\n", "\n")
    return text_grammar(Body.read({"structured_outputs": {"regex": plain}}))
