"""Tool calls are found in time that grows as the text does, and in the same places however it arrives."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from router.text.tool_calls import Found, HermesParser, LlamaParser, ToolForm, parser_of

PIECES = 2000
HERMES_CALL = '{"name": "f", "arguments": {"x": "'


class Piece(str):
    """Text that counts what it is put behind, hence what is copied for it."""

    __slots__ = ()
    copied = 0

    def __radd__(self, before: str) -> str:
        Piece.copied += len(before)
        return str(before) + str(self)


@pytest.mark.parametrize(
    ("form", "begin", "repeated", "end"),
    [
        (ToolForm.HERMES, "<tool_call>" + HERMES_CALL, "word ", '"}}</tool_call>'),
        (ToolForm.HERMES, "x", " \n ", "x"),
        (ToolForm.LLAMA, '\n{"name": "f", "parameters": {"x": "', "word ", '"}}'),
        (ToolForm.LLAMA, "", "\n  ", "x"),
    ],
)
def test_text_that_is_held_is_not_copied_for_every_piece(form: ToolForm, begin: str, repeated: str, end: str) -> None:
    parser, whole = parser_of(form, {"f"}), parser_of(form, {"f"})
    parser.push(begin)
    Piece.copied = 0
    held = [parser.push(Piece(repeated)) for _ in range(PIECES)]
    assert Piece.copied < 20 * PIECES
    found = Found(begin if begin == "x" else "")
    for one in [*held, parser.push(end), parser.finish()]:
        found = found.then(one)
    assert found == whole.push(begin + repeated * PIECES + end).then(whole.finish())
    assert found.content or found.calls


def test_calls_behind_each_other_are_read_from_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    class Decoder(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
            lengths.append(len(s))
            return super().raw_decode(s, idx)

    monkeypatch.setattr(json, "JSONDecoder", Decoder)
    text = '{"name": "f", "parameters": {}} ; ' * PIECES
    parser = LlamaParser({"f"})
    parser.push(text)
    assert len(parser.finish().calls) == PIECES
    assert lengths == [len(text.strip())] * PIECES


def test_a_hermes_call_goes_on_behind_what_looks_like_the_beginning_of_its_end() -> None:
    parser = HermesParser()
    pieces = ["<tool_call>" + HERMES_CALL, "</tool", "_", "call", "> </tool_", 'x"}}', "</tool_cal", "l> ", "so"]
    found = Found()
    for piece in pieces:
        found = found.then(parser.push(piece))
    assert found.content == "so"
    assert [call.arguments for call in found.calls] == ['{"x": "</tool_call> </tool_x"}']


def test_calls_in_the_llama_form_are_the_same_however_the_text_arrives() -> None:
    rng = Random(29)
    parts = ["<|python_tag|>", "<|pyt", '{"name": "f", "parameters": {}}', ";", " ", "\n", "x", "{"]
    called = 0
    for _ in range(2000):
        text = "".join(rng.choices(parts, weights=[2, 1, 6, 4, 3, 3, 1, 1], k=rng.randint(1, 6)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=6))
        parser, whole = LlamaParser({"f"}), LlamaParser({"f"})
        found = Found()
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            found = found.then(parser.push(text[start:end]))
        found = found.then(parser.finish())
        assert found == whole.push(text).then(whole.finish())
        assert found.content == text or found.calls
        called += bool(found.calls)
    assert called > 200
