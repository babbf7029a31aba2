"""Prompts of a fit: what a file may hold, and one line that names file and line where it does not."""

import json

import pytest

from benchmarks.harness import prompts
from benchmarks.harness.prompts import PromptError, bundled, read
from benchmarks.serve.client import body
from benchmarks.serve.settings import ServeOptions, ServerContender
from router.generation import ServedModel
from router.schema.request_schema import ChatBody
from router.schema.requests import ModelEntry, request_of
from router.text.tokenizer import Tokenizer
from tests.bundled import MODELS


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(str(MODELS / "target"))


def test_the_bundled_ones_are_of_every_kind_and_leave_room_for_an_answer(tokenizer):
    found = bundled()
    assert list(dict.fromkeys(prompt.kind for prompt in found)) == list(prompts.KINDS)
    for kind in prompts.KINDS:
        assert sum(prompt.kind == kind for prompt in found) == 12
    lengths = [len(prompt.tokens(tokenizer)) for prompt in found]
    assert 4 <= min(lengths) < max(lengths) <= 400
    assert len({prompt.text for prompt in found}) == len(found)


def test_plain_text_has_a_prompt_a_line_and_the_kind_of_its_file(tmp_path):
    file = tmp_path / "tickets.txt"
    file.write_bytes("Why is it slow?\r\n\n  Grüezi \n".encode())
    assert [(one.kind, one.text) for one in read(file)] == [("tickets", "Why is it slow?"), ("tickets", "  Grüezi ")]


def test_json_lines_may_say_their_kind_and_hold_a_chat(tmp_path, tokenizer):
    file = tmp_path / "mixed.jsonl"
    chat = [{"role": "user", "content": "Say yes."}]
    file.write_text(f'{{"prompt": "a\\nb", "kind": "code"}}\n{json.dumps({"messages": chat})}\n')
    first, second = read(file)
    assert (first.kind, first.text, second.kind) == ("code", "a\nb", "mixed")
    assert first.tokens(tokenizer) == tokenizer.encode("a\nb", special=True)
    assert tokenizer.chat_template is not None
    assert second.tokens(tokenizer) == tokenizer.encode(tokenizer.chat_template.render(chat), special=False)


def test_a_chat_is_encoded_as_the_api_would(tmp_path, tokenizer):
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"in": "Bern"}'}}
    chat = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "noon"},
        ],
        "tools": [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}],
    }
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps(chat))
    (prompt,) = read(file)
    entry = ModelEntry("m", ServedModel("m", tokenizer.size, 2048, 0), tokenizer, max_choices=1)
    asked = request_of(ChatBody.read(chat), entry, "")
    assert prompt.tokens(tokenizer) == asked.prompts[0].tokens
    said = tokenizer.decode(prompt.tokens(tokenizer))
    assert all(part in said for part in ('# {"name": "now", "parameters"', "# be\n# brief", '{"in": "Bern"}', "# noon"))
    sent = body(ServeOptions(chat=True), ServerContender("a", ""), prompt, 0)
    assert {name: sent[name] for name in chat} == chat


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no prompts; give one a line"),
        (b"\n \n", "holds no prompts"),
        (b"good\n\xff\xfe\n", "line 2 is not UTF-8 text"),
        (b"good\nbad\0\n", "line 2 holds a zero byte"),
        (b'{"prompt": "a"}\nb\n', "line 2 is no JSON object"),
        (b'"a"\n[1]\n', "line 2 is no JSON object"),
        (b'"\\ud800"', "line 1 is no JSON object"),
        (b'{"prompt": 5}\n', "line 1: prompt is 5; it must be a string"),
        (b'{"prompt": ""}\n', 'line 1: prompt is ""; it must be a string that is not empty'),
        (b'{"text": "a"}\n', "line 1: must have either prompt or messages, has text"),
        (b'{"prompt": "a", "messages": []}\n', "line 1: must have either prompt or messages"),
        (b'{"messages": []}\n', "line 1: messages must be a list of objects"),
        (b'{"messages": [{"role": "user"}]}\n', "line 1: messages must be a list of objects"),
        (b'{"messages": [{"role": "user", "content": ""}], "tools": 7}\n', "line 1: tools is 7; it must be a list"),
        (b'{"prompt": "a", "kind": 7}\n', "line 1: kind is 7; it must be a name"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(content, words, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(PromptError) as refused:
        read(file)
    said = str(refused.value)
    assert said.startswith(f"{file}")
    assert words in said
    assert "\n" not in said


def test_a_file_that_is_not_there_or_too_much_is_refused(tmp_path, monkeypatch):
    with pytest.raises(PromptError, match="No such file"):
        read(tmp_path / "none.txt")
    file = tmp_path / "many.txt"
    file.write_text("a\n" * 30)
    monkeypatch.setattr(prompts, "MOST_PROMPTS", 20)
    with pytest.raises(PromptError, match="holds 30 prompts; give a sample of your traffic, at most 20"):
        read(file)
    monkeypatch.setattr(prompts, "MOST_BYTES", 20)
    with pytest.raises(PromptError, match="give a sample of your traffic"):
        read(file)


def test_a_chat_needs_a_template(tmp_path, tokenizer, monkeypatch):
    file = tmp_path / "chat.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(PromptError, match="line 1: the model has no chat template"):
        read(file)[0].tokens(tokenizer)


def test_a_chat_that_the_api_refuses_is_named(tmp_path, tokenizer):
    file = tmp_path / "chat.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": 5}]}\n')
    with pytest.raises(PromptError, match=r"line 1: messages\[0\].content must be a string"):
        read(file)[0].tokens(tokenizer)
