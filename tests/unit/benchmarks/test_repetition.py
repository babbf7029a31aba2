"""The benchmark of repeating output: who takes part, and requests whose answers are held to what they should be."""

from __future__ import annotations

import re

from benchmarks.drafting import NOT_COUNTED, REPETITION
from benchmarks.grammar_prompts import ROWS, edits, functions, rows
from speculation.messages import Source


def test_nobody_drafts_from_the_grammar_nor_from_what_others_said() -> None:
    drafting = {name: one.sources for name, one in REPETITION.items() if one.enabled}
    assert drafting == {
        "lookup": {Source.LOOKUP},
        "suffix": {Source.SUFFIX},
        "both": {Source.LOOKUP, Source.SUFFIX},
    }
    assert {name for name, one in REPETITION.items() if one.remember} == {"suffix", "both"}


def test_requests_of_a_kind_are_alike_and_ask_for_different_things() -> None:
    for requests in (rows(), edits(), functions()):
        assert len(requests) > NOT_COUNTED
        assert len({request.prompt for request in requests}) == len(requests)
    assert len({request.grammar for request in (*rows(), *edits())}) == len(rows()) + len(edits())
    for request in rows():
        labels = re.findall(r"^\d+,([a-z-]+),", request.prompt, re.MULTILINE)
        assert len(labels) == ROWS
        assert all(label.split("-")[1] in request.grammar for label in labels)
