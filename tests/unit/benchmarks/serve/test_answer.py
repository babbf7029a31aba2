"""Streams in the shapes that servers send: what came when, how many tokens, what of the drafts, and what is wrong."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from benchmarks.serve.client import CUT, FAILED, MALFORMED, AnswerError, Drafts, Events, Heard, error_text


def sse(*chunks: object, done: bool = True, end: str = "\n") -> bytes:
    lines = [f"data: {json.dumps(chunk)}{end}{end}" for chunk in chunks]
    return "".join([*lines, f"data: [DONE]{end}{end}"] if done else lines).encode()


def chunk(finish: str | None = None, **delta: object) -> dict:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def piece(text: str, finish: str | None = None, **choice: object) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **choice}]}


def used(tokens: int, **details: int) -> dict:
    return {"usage": {"completion_tokens": tokens} | ({"completion_tokens_details": details} if details else {})}


def read(raw: bytes, cuts: list[int] | None = None) -> Heard:
    """The answer; the time of a chunk is the number of the read that completed it."""
    events, answer = Events(), Heard()
    places = [0, *(cuts or []), len(raw)]
    for number, (start, stop) in enumerate(pairwise(places), 1):
        for data in events.feed(raw[start:stop]):
            answer.take(data, float(number))
    return answer


OPENAI = sse(
    chunk(role="assistant", content=""), chunk(content="Hel"), chunk(content="lo"), chunk("stop"),
    {"choices": [], **used(2)},
)  # fmt: skip
VLLM = sse(
    chunk(role="assistant", content="") | used(0),
    chunk(reasoning_content="So ") | used(3),
    chunk(content="yes") | used(5),
    chunk("length", content="!") | used(6),
    {"choices": [], "metrics": {"speculative_decoding": {
        "num_spec_steps": 2, "num_accepted_draft_tokens": 3, "num_draft_tokens": 6}}, **used(6)},
)  # fmt: skip
LLAMA_CPP = (
    b":\n\n: ping\r\n\r\nevent: message\nid: 7\n"
    + sse(chunk(role="assistant", content=None), chunk(content="a"), chunk(content="bc"), done=False)
    + sse(
        chunk("stop"),
        {"choices": [], **used(4), "timings": {"predicted_n": 4, "draft_n": 8, "draft_n_accepted": 2}},
        end="\r\n",
    )
)
TRANSFORMERS = sse(piece("a"), piece("b"), piece("", "length") | used(2), done=False)
PACELINE = sse(
    piece("ab") | {"speculation": {"tokens": 2, "accepted": 1, "offered": 3}, "usage": None},
    piece("") | {"speculation": {"tokens": 1, "accepted": 0, "offered": 0}},
    piece("c") | {"speculation": {"tokens": 3, "accepted": 2, "offered": 2}},
    piece("", "stop"),
    {"choices": [], **used(6, accepted_draft_tokens=3, rejected_draft_tokens=2)},
)
UNCOUNTED = sse(piece("a"), piece("b", "stop"))
TOKEN_IDS = sse(piece("ab", token_ids=[5, 6]), piece("", token_ids=[7]), piece("c", "stop", token_ids=[8]))


@pytest.mark.parametrize(
    ("raw", "chunks", "sizes", "tokens", "drafts"),
    [
        pytest.param(OPENAI, 2, None, 2, None, id="OpenAI"),
        pytest.param(VLLM, 3, (3, 2, 1), 6, Drafts(3, 6, 2), id="vLLM"),
        pytest.param(LLAMA_CPP, 2, None, 4, Drafts(2, 8, None), id="llama.cpp"),
        pytest.param(TRANSFORMERS, 2, None, 2, None, id="transformers"),
        pytest.param(PACELINE, 3, (2, 1, 3), 6, Drafts(3, 5, 2), id="Paceline"),
        pytest.param(UNCOUNTED, 2, None, 2, None, id="nothing counted"),
        pytest.param(TOKEN_IDS, 3, (2, 1, 1), 4, None, id="token ids"),
        pytest.param(sse(piece("all of it", "stop") | used(9)), 1, (9,), 9, None, id="one chunk"),
        pytest.param(sse(piece("", "stop") | used(1)), 0, (), 1, None, id="no text"),
    ],
)
def test_every_shape_is_read_however_it_is_cut(raw, chunks, sizes, tokens, drafts) -> None:
    seed = random.randrange(1 << 30)
    cuts = sorted(random.Random(seed).sample(range(len(raw)), 20))
    whole, apart = read(raw), read(raw, cuts)
    assert whole.digest == apart.digest, seed
    for answer in (whole, apart):
        found = (len(answer.times), answer.sizes, answer.tokens, answer.drafts, answer.finished)
        assert found == (chunks, sizes, tokens, drafts, True), seed
    assert whole.guessed == (raw == UNCOUNTED)
    assert set(whole.times) <= {1.0}


def test_the_first_chunk_with_a_role_is_no_token() -> None:
    raw = OPENAI
    answer = read(raw, [raw.index(b"Hel") - 60, raw.index(b"Hel") + 20])
    assert answer.times[0] > 1.0


def test_texts_differ_by_what_they_say_only() -> None:
    assert read(UNCOUNTED).digest == read(TRANSFORMERS).digest
    assert read(UNCOUNTED).digest != read(TOKEN_IDS).digest


@pytest.mark.parametrize(
    ("raw", "kind", "words"),
    [
        (b'data: {"error": {"message": "out of\\nmemory", "code": 5}}\n\n', FAILED, "out of memory"),
        (b'data: {"error": "it broke"}\n\n', FAILED, "it broke"),
        (b'data: {"object": "error", "message": "gone", "code": 400}\n\n', FAILED, "gone"),
        (b'data: {"error": "it "broke""}\n\n', MALFORMED, "not JSON"),
        (b"data: [1]\n\n", MALFORMED, "not an object"),
        (b'data: {"hello": 1}\n\n', MALFORMED, "no choices"),
        (b'data: {"choices": 7}\n\n', MALFORMED, "no choices"),
        (b"data: " + b"[" * 100_000 + b"\n\n", MALFORMED, "not JSON"),
    ],
)
def test_a_bad_event_is_an_error_of_its_kind(raw, kind, words) -> None:
    with pytest.raises(AnswerError, match=words) as caught:
        read(raw)
    assert caught.value.kind == kind != CUT


def test_an_event_without_an_end_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.serve.client.MOST_BYTES", 1000)
    with pytest.raises(AnswerError, match="more than 1000 bytes"):
        read(b"data: " + b"x" * 2000)
    with pytest.raises(AnswerError, match="more than 1000 bytes"):
        read(b"data: 0123456789\n" * 200)


@pytest.mark.parametrize("value", [None, 5, [], "x", {"text": 5, "finish_reason": None, "delta": []}])
def test_odd_values_where_others_belong_are_no_text(value) -> None:
    answer = read(sse({"choices": [value], "usage": [], "timings": 5, "speculation": "x", "metrics": None}))
    assert (answer.times, answer.tokens, answer.drafts) == ([], 0, None)


def test_errors_are_told_in_one_line() -> None:
    assert error_text({"error": {"message": "no", "param": "n"}}) == "no (n)"
    assert error_text({"detail": "pinned\nto another"}) == "pinned to another"
    assert len(error_text({"detail": "x" * 10_000})) == 300


@pytest.mark.parametrize(("told", "cached"), [({"cached_tokens": 32}, 32), (None, 0), ({"cached_tokens": None}, 0)])
def test_what_a_prefix_cache_had_is_told(told, cached) -> None:
    answer = Heard()
    answer.take(json.dumps({"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens_details": told}}), 1.0)
    assert answer.cached == cached
