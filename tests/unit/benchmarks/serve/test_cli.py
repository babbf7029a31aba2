"""The flags of ``paceline bench serve``: mistakes are answered in one line, and the rest arrives."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.harness.prompts import Prompt, PromptError
from benchmarks.serve import report
from benchmarks.serve.client import body, read_prompts
from benchmarks.serve.settings import PACELINE, ServeOptions, ServerContender
from cluster.cli import main

URL = ("--url", "http://127.0.0.1:8000")


@pytest.fixture
def started(monkeypatch) -> list[ServeOptions]:
    """The options of runs that would have begun."""
    options: list[ServeOptions] = []
    monkeypatch.setattr(report, "main", lambda given: options.append(given) or 0)
    return options


def test_flags_arrive(started, monkeypatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sesame")
    assert main(["bench", "serve"]) == 0
    assert main(["bench", "serve", "--url", "ours=https://a:1/v1/", "--url", "http://b/x", "--model", "ours=m=1",
                 "--extra-body", 'b={"top_p": 0.5}', "--api-key-env", "SOME_KEY",
                 "--rate", "0.5", "--requests", "9", "--chat"]) == 0  # fmt: skip
    default, given = started
    assert default.contenders == (ServerContender("127.0.0.1:8000", "http://127.0.0.1:8000"),)
    assert (default.rate, default.concurrency, default.requests, default.rounds) == (None, 1, 40, 6)
    assert given.contenders == (
        ServerContender("ours", "https://a:1", "m=1", {}, "sesame"),
        ServerContender("b", "http://b/x", "", {"top_p": 0.5}, "sesame"),
    )
    assert (given.rate, given.requests, given.chat) == (0.5, 9, True)
    assert "sesame" not in repr(given)


def test_prompts_are_read(tmp_path) -> None:
    lines = tmp_path / "p.jsonl"
    lines.write_text('"one"\n\n{"prompt": "two", "kind": "code"}\n{"messages": [{"role": "user", "content": "3"}]}\n')
    assert [one.text for one in read_prompts(str(lines), chat=True)[:2]] == ["one", "two"]
    assert read_prompts(str(lines), chat=True)[2].messages == ({"role": "user", "content": "3"},)
    with pytest.raises(PromptError, match=r"line 4 is a conversation; send it with --chat"):
        read_prompts(str(lines), chat=False)
    plain = tmp_path / "p.txt"
    plain.write_text("one\n  two\n")
    assert [one.text for one in read_prompts(str(plain), chat=False)] == ["one", "  two"]
    assert len(read_prompts("bundled", chat=False)) == 40


def test_a_file_that_is_not_there_is_refused(tmp_path, capsys) -> None:
    assert main(["bench", "serve", *URL, "--prompts", str(tmp_path / "p.txt")]) == 2
    said = capsys.readouterr().err
    assert f"--prompts {tmp_path / 'p.txt'}: No such file" in said and said.count("\n") == 1


def test_requests_of_a_number_differ_between_contenders_in_what_they_must() -> None:
    options = ServeOptions(seed=7)
    number = random.randrange(1000)
    bodies = [
        body(options, replace(contender, make=make, model="m"), Prompt("", "", "p"), number)
        for contender, make in (
            (ServerContender("a", ""), PACELINE),
            (ServerContender("a", "", plain=True), PACELINE),
            (ServerContender("b", "", extra={"speculation": {"rule": "rejection", "max_depth": 3}}), PACELINE),
            (ServerContender("b", "", extra={"speculation": {"remember": True}}), PACELINE),
            (ServerContender("c", ""), "llama.cpp"),
        )
    ]
    speculation = [one.pop("speculation", None) for one in bodies]
    assert speculation == [
        {"remember": False},
        {"remember": False, "enabled": False},
        {"remember": False, "max_depth": 3, "rule": "rejection"},
        {"remember": True},
        None,
    ]
    options_sent = [one.pop("stream_options") for one in bodies]
    assert options_sent[:4] == [{"include_usage": True, "include_speculation": True}] * 4
    assert options_sent[4] == {"include_usage": True}
    assert all(one == bodies[0] for one in bodies)
    assert (bodies[0]["seed"], bodies[0]["prompt"]) == (7 + number, "p")
