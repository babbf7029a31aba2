"""What ``paceline complete`` asks for, and what it shows."""

import sys
from collections.abc import Iterator

import pytest

from cluster import completion
from cluster.commands import complete
from cluster.completion import CompletionRequest


def test_neither_run_of_a_comparison_leaves_an_answer_for_the_next_to_copy() -> None:
    request = CompletionRequest("def fib(n):", 8, temperature=0.0, seed=1)
    drafted, plain = (request.body(speculate=speculate) for speculate in (True, False))
    assert drafted.pop("speculation") == {"enabled": True, "remember": False}
    assert plain.pop("speculation") == {"enabled": False, "remember": False}
    assert drafted == plain


def test_a_terminal_obeys_nothing_in_the_text_and_a_file_gets_it_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "a\x1b]52;c;ZXZpbA==\x07\tb\r\x9b2J\nü"

    def stream(*_: object) -> Iterator[tuple[str, bool]]:
        yield said, False

    monkeypatch.setattr(completion, "stream", stream)
    request = CompletionRequest("p\x1b[2J", 8, temperature=0.0, seed=1)
    shown = []
    for terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        complete.show("", request, compare=False)
        shown.append(capsys.readouterr().out)
    in_file, on_terminal = shown
    assert in_file == f"{said}\n"
    unstyled = on_terminal.replace("\x1b[2m", "").replace("\x1b[0m", "").expandtabs(1)
    assert " ".join(unstyled.split()) == "p?[2Ja?]52;c;ZXZpbA==? b?2J ü"
