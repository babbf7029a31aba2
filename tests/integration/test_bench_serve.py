"""``paceline bench serve`` against servers of every kind, on real sockets: what it sends, counts, refuses and shows."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading

import pytest

from benchmarks.harness.prompts import Prompt
from benchmarks.serve import rounds
from benchmarks.serve.report import figures, result
from benchmarks.serve.rounds import Log, ServerError
from benchmarks.serve.settings import OTHER, ServeOptions, ServerContender
from cluster.cli import main
from router.generation import ServedModel
from tests.fakes import FakeGenerator, commits, tiny_tokenizer
from tests.http_server import serve as serve_ours
from tests.openai_server import HANG, FakeServer, Reply, as_json, events, models, serving, text
from tests.ports import free_port

STREAM = events(text("ab"), text("c"), text("", "length", usage={"completion_tokens": 3}))
MODELS = models("m")


def good(path: str, body: dict) -> Reply:
    return MODELS if path == "/v1/models" else STREAM


def bench(*arguments: str) -> int:
    return main(["bench", "serve", *arguments])


async def measured(*servers: FakeServer, **given) -> Log:
    contenders = tuple(ServerContender(name, one.url) for name, one in zip("abc", servers, strict=False))
    values = {"requests": 6, "rounds": 2, "warmup": 1, "timeout": 30.0, "concurrency": 1, **given}
    log = Log()
    await rounds.measure(
        ServeOptions(contenders=contenders, **values), [Prompt("", "", f"p{n}") for n in range(4)], log
    )
    return log


def refused(path: str, body: dict, status: int = 400, **error: object) -> Reply:
    return MODELS if path == "/v1/models" else as_json({"error": {"message": "no", **error}}, status)


HTML = Reply([(0.0, b"<html>hello</html>")], 200, {"content-type": "text/html"})
BAD_SERVERS = [
    (lambda path, body: HTML, "answered by text/html (<html>hello</html>), no list"),
    (lambda path, body: as_json({"detail": "Not Found"}, 404), "/v1/models is answered by 404: not OpenAI's API"),
    (lambda path, body: as_json({"models": ["m"]}), "no list of models"),
    (lambda path, body: as_json([1]), "no list of models"),
    (lambda path, body: as_json({"data": ["m"]}), "no list of models"),
    (lambda path, body: models(), "lists no models; name one by --model"),
    (lambda path, body: models("m", "n"), "serves m, n; choose by --model"),
    (lambda path, body: as_json({"error": {"message": "who?"}}, 401), "answered by 401: not OpenAI's API, or it wants"),
    (lambda path, body: Reply([(0.0, b"")], 302, {"location": "http://other.test"}), "answered by 302"),
    (lambda path, body: MODELS if path == "/v1/models" else as_json({"choices": []}), "not a stream of events"),
    (lambda path, body: MODELS if path == "/v1/models" else HTML, "not a stream of events"),
    (lambda path, body: MODELS if path == "/v1/models" else events(text("a"), done=False), "without saying why"),
    (lambda path, body: refused(path, body, param="seed"), "HTTP 400: no (seed)"),
    (
        lambda path, body: refused(path, body, 404),
        "by /v1/completions for m failed: HTTP 404: no; another --model, --chat",
    ),
    (lambda path, body: refused(path, body, 401), "HTTP 401: no; another --model, --chat or not, or a key by --api"),
    (lambda path, body: refused(path, body, 500), "HTTP 500: no"),
]


@pytest.mark.parametrize(("script", "words"), BAD_SERVERS)
def test_what_is_no_server_is_told_in_one_line_before_any_load(script, words, capsys) -> None:
    with serving(script) as server:
        assert bench("--url", server.url) == 1
    said = capsys.readouterr().err
    assert words in said
    assert server.url in said
    assert said.count("\n") == 1
    assert len(server.asked) <= 2


def test_an_address_where_nothing_or_something_else_listens(capsys) -> None:
    assert bench("--url", f"http://127.0.0.1:{free_port()}") == 1
    assert "nothing answers there" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            connection, _ = listener.accept()
            connection.recv(1 << 16)
            connection.sendall(b"220 mail.test ready\r\n")
            connection.close()

        thread = threading.Thread(target=speak)
        thread.start()
        assert bench("--url", f"http://127.0.0.1:{listener.getsockname()[1]}") == 1
        thread.join(60)
    assert "not in HTTP" in capsys.readouterr().err


def test_another_model_is_refused_by_what_is_served(capsys) -> None:
    with serving(lambda path, body: refused(path, body, 404)) as server:
        assert bench("--url", server.url, "--model", "x") == 1
    assert "for x failed: HTTP 404: no; another --model (it lists m)" in capsys.readouterr().err


async def test_a_server_that_lists_nothing_is_taken_at_its_word() -> None:
    """`transformers serve` fails at its list of models and serves the one it was started with."""

    def script(path: str, body: dict) -> Reply:
        return Reply([(0.0, b"oops")], 500, {}, kept=False) if path == "/v1/models" else STREAM

    with serving(script) as server:
        log = Log()
        contender = ServerContender("a", server.url, model="./m")
        await rounds.measure(
            ServeOptions(contenders=(contender,), requests=2, rounds=1, concurrency=1), [Prompt("", "", "p")], log
        )
    assert [(one.make, one.model) for one in log.contenders] == [(OTHER, "./m")]
    assert [one.error for turn in log.turns for one in turn.heard] == ["", ""]


async def test_contenders_take_turns_with_the_same_requests() -> None:
    asked: list[tuple[str, str, int]] = []

    def script(name: str):
        def answer(path: str, body: dict) -> Reply:
            if body:
                asked.append((name, body["prompt"], body["seed"]))
            return good(path, body)

        return answer

    with serving(script("a")) as a, serving(script("b")) as b:
        log = await measured(a, b, requests=5, seed=10)
    first = [("p0", 10), ("p2", 12), ("p0", 14)]
    second = [("p1", 11), ("p3", 13)]
    expected = [(name, "p0", 10) for name in "ab"] + [(name, "p3", 11) for name in "ab"]
    for name, requests in (("a", first), ("b", first), ("b", second), ("a", second)):
        expected += [(name, *request) for request in requests]
    assert asked == expected
    assert [(turn.contender.name, turn.round) for turn in log.turns] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]


async def test_latencies_are_at_least_what_the_server_took() -> None:
    slow = events(text("a"), text("b"), text("c", "length"), pause=0.02)
    with serving(lambda path, body: MODELS if path == "/v1/models" else slow) as server:
        log = await measured(server, rate=100.0)
    heard = [one for turn in log.turns for one in turn.heard]
    assert len(heard) == 6
    for one in heard:
        assert one.sent >= one.due
        for place, at in enumerate(one.times, 1):
            assert at - one.sent >= 0.02 * place
        assert one.ended >= one.times[2]
        assert (one.tokens, one.guessed) == (3, True)


@pytest.mark.thorough
async def test_every_failure_is_counted_by_its_kind(capsys) -> None:
    failures = [
        as_json({"error": {"message": "full"}}, 429, retry_after="0.01"),
        as_json({"error": {"message": "full"}}, 429),
        as_json({"error": {"message": "broken"}}, 503),
        events(text("a"), {"error": {"message": "lost it"}}, done=False),
        events(text("a"), done=False),
        Reply([(0.0, b"data: {]\n\n")]),
        Reply([(0.0, b'data: {"choices": []}\n\n')], whole=False),
        Reply([(HANG, b"")]),
    ]
    script = iter([STREAM, STREAM, *failures])
    options = {"requests": 8, "rounds": 1, "timeout": 6.0}
    with serving(lambda path, body: MODELS if path == "/v1/models" else next(script)) as server:
        log = await measured(server, **options)
    contenders = (ServerContender("a", server.url),)
    given = ServeOptions(contenders=contenders, **options)
    row = figures(log, log.contenders[0], given)
    assert row["errors"] == {
        "HTTP 429 with Retry-After": 1,
        "HTTP 429": 1,
        "HTTP 503": 1,
        "error in stream": 1,
        "stream cut short": 1,
        "malformed stream": 1,
        "connection lost": 1,
        "timeout": 1,
    }
    assert (row["requests"], row["ok"]) == (8, 0)
    result(log, given).show()
    shown = capsys.readouterr().out
    for kind in row["errors"]:
        assert kind in shown


def test_a_run_is_shown_and_written(tmp_path, capsys) -> None:
    figures = tmp_path / "figures.json"
    with serving(good) as a, serving(good) as b:
        given = ["--url", f"x={a.url}/v1/", "--url", f"y={b.url}", "--requests", "4", "--concurrency", "2"]
        assert bench(*given, "--json", str(figures), "--out", str(tmp_path / "out")) == 0
    shown = capsys.readouterr().out
    for words in ("time to first token", "4 of 4", "2 at once"):
        assert words in shown
    document = json.loads(figures.read_text())
    assert len(document["requests"]) == 8
    assert {(one["variant"], one["baseline"]) for one in document["comparisons"]} == {
        ("y", "x"),
    }
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "README.md",
        "serve.json",
    }


def test_a_key_goes_to_its_contender_only(monkeypatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sesame")
    with serving(good) as a, serving(good) as b:
        given = ["--url", f"x={a.url}", "--url", f"y={b.url}", "--requests", "1", "--warmup", "0"]
        assert bench(*given, "--api-key-env", "y=SOME_KEY") == 0
    assert all("sesame" not in head for head in a.headers)
    assert all("authorization: Bearer sesame" in head for head in b.headers)


def test_fields_of_the_user_reach_the_server() -> None:
    with serving(good) as server:
        given = ["--url", server.url, "--requests", "1", "--warmup", "0"]
        extra = '{"inner": {"k": [3]}, "seed": null, "stream_options": {"other": 1}}'
        assert bench(*given, "--extra-body", extra, "--chat", "--max-tokens", "9") == 0
    *_, three = server.completions
    assert three["inner"] == {"k": [3]}
    assert three["messages"][0]["role"] == "user"
    assert three["stream_options"] == {"include_usage": True, "other": 1}
    assert (three["max_tokens"], three["stream"], "seed" in three, "speculation" in three) == (9, True, False, False)


def test_only_paceline_can_be_asked_not_to_speculate(capsys) -> None:
    with serving(good) as server:
        assert bench("--url", server.url, "--against-plain") == 1
    assert "no --url is one" in capsys.readouterr().err


def test_vllm_is_asked_for_what_it_alone_offers() -> None:
    def script(path: str, body: dict) -> Reply:
        return models("m", owner="vllm") if path == "/v1/models" else STREAM

    with serving(script) as server:
        assert bench("--url", server.url, "--requests", "2") == 0
    assert server.completions[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_paceline_itself_is_measured_with_and_without_drafts(tmp_path, capsys) -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.encode("hello world, hello the quick brown fox", special=False)
    generator = FakeGenerator(
        lambda generation: commits(tokens, [3] if generation.speculation.enabled else [1]),
        model=ServedModel("tiny", tokenizer.size, 512, tokenizer.digest),
    )
    figures = tmp_path / "figures.json"
    given = ["--requests", "4", "--max-tokens", str(len(tokens)), "--temperature", "0.7", "--json", str(figures)]
    with serve_ours(generator, tokenizer) as url:
        urls = ["--url", f"two={url}", "--url", f"six={url}", "--against-plain"]
        depths = [f'{name}={{"speculation": {{"max_depth": {depth}}}}}' for name, depth in (("two", 2), ("six", 6))]
        assert bench(*urls, "--extra-body", depths[0], "--extra-body", depths[1], *given) == 0
    document = json.loads(figures.read_text())
    assert set(document["figures"]) == {"two", "two plain", "six", "six plain"}
    drafted, plain = document["figures"]["two"], document["figures"]["two plain"]
    assert drafted["by_token"] and plain["by_token"]
    assert drafted["tokens"] == plain["tokens"] == 4 * len(tokens)
    assert drafted["accepted"] > 0 == plain["accepted"]
    assert [one["same"] for one in document["comparisons"]] == [4] * 3
    asked = {(one.speculation.enabled, one.speculation.max_depth) for one in generator.generations}
    assert {(True, 2), (True, 6)} < asked
    assert {depth for enabled, depth in asked if not enabled} == {2, 6}
    assert not any(one.speculation.remember for one in generator.generations), "a contender may copy from another"


def test_after_an_interruption_there_is_what_there_was(capsys) -> None:
    asked = iter(range(100))

    def script(path: str, body: dict) -> Reply:
        if path == "/v1/models":
            return MODELS
        if next(asked) < 4:
            return STREAM
        os.kill(os.getpid(), signal.SIGINT)
        return Reply([(HANG, b"")])

    with serving(script) as server:
        assert bench("--url", f"x={server.url}", "--requests", "12", "--rounds", "2", "--warmup", "0") == 130
    output = capsys.readouterr()
    assert "interrupted; shown is what there was" in output.err
    assert "x: interrupted with 1 requests under way" in output.out


async def test_nothing_is_measured_before_all_servers_are_known() -> None:
    with serving(good) as a, serving(lambda path, body: HTML) as b:
        with pytest.raises(ServerError, match="text/html"):
            await measured(a, b)
    assert len(a.completions) == 1
