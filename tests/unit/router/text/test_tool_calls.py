"""Tool calls are found in time that grows as the text does, and in the same places however it arrives."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from router.text.chat_template import ChatTemplate
from router.text.tool_calls import Found, HermesParser, LlamaParser, ToolForm, parser_of
from tests.fakes import tiny_tokenizer

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


ASKED = "{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}"
CHAT = (
    "{% for m in messages %}<|start|>{{ m.role }}<|end|>\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "CALL{% endfor %}<|eot|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\nTHINK{% endif %}"
)
NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
NAMED = f'{{"name": "{NAME}", '
TAGGED = f'<tool_call>\n{NAMED}"arguments": {ARGUMENTS}}}\n</tool_call>'
LLAMA = f'{NAMED}"parameters": {ARGUMENTS}}}'
TRIED: dict[str, tuple[str, ToolForm | None]] = {
    "Qwen2.5": (TAGGED, ToolForm.HERMES),
    "Qwen3": (f"<think>\n\n</think>\n\n{TAGGED}", ToolForm.HERMES),
    "Hermes 2 Pro": (f'<tool_call>\n{{"arguments": {ARGUMENTS}, "name": "{NAME}"}}\n</tool_call>', ToolForm.HERMES),
    "Llama 3.1": (LLAMA, ToolForm.LLAMA),
    "with another name for arguments": (f'{NAMED}"arguments": {ARGUMENTS}}}<|python_tag|>', ToolForm.LLAMA),
    "Command R7B": (
        f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "{NAME}", "parameters": {ARGUMENTS}}}]<|END_ACTION|>',
        None,
    ),
    "Command R+": (f'```json\n[{{"tool_name": "{NAME}", "parameters": {ARGUMENTS}}}]```', None),
    "GigaChat 3": (f'function call<|role_sep|>\n{NAMED}"arguments": {ARGUMENTS}}}{{# "parameters" #}}', None),
    "Functionary 3.1": (f"<function={NAME}>{ARGUMENTS}</function><|python_tag|>", None),
    "Muse": (f'<invoke name="{NAME}">1</invoke><|python_tag|>', None),
    "MiniMax M3": (f']<]minimax[>[<invoke name="{NAME}">1</invoke>{{# <tool_call> #}}', None),
    "Apriel 1.5": (f'<tool_calls>[{NAMED}"arguments": {ARGUMENTS}}}]</tool_calls>{{# <tool_call> #}}', None),
    "in Hermes' form without a call": ("{# <tool_call> #}", ToolForm.HERMES),
    "in Llama's form without a call": ('{# "parameters" #}', ToolForm.LLAMA),
    "that writes no call": ("{{ raise_exception('no calls') }}{# <tool_call> #}", ToolForm.HERMES),
    "that wants arguments as a string": (
        '{"name": {{ c.function.name }}, "parameters": {{ "" + c.function.arguments }}}',
        ToolForm.LLAMA,
    ),
}


@pytest.mark.parametrize("thinks", ["", "<think>\n"])
@pytest.mark.parametrize(("written", "form"), TRIED.values(), ids=TRIED)
def test_the_form_of_calls_is_the_one_that_the_template_writes(
    written: str, form: ToolForm | None, thinks: str
) -> None:
    template = ASKED + CHAT.replace("CALL", written).replace("THINK", thinks)
    assert ChatTemplate(template, {}).tool_form is form


def test_marks_that_no_reader_of_an_answer_sees_are_of_no_call() -> None:
    framed = CHAT.replace("{{ m.content }}", "{% if m.tool_calls %}<|py|>{% endif %}{{ m.content }}")
    template = ASKED + framed.replace("CALL", f"<|/py|>{LLAMA}").replace("THINK", "")  # as Llama 4 does
    assert ChatTemplate(template, {}).tool_form is None
    assert ChatTemplate(template, {}, ["<|py|>", "<|/py|>", "<|python_tag|>"]).tool_form is ToolForm.LLAMA
    tokenizer = tiny_tokenizer(template.replace("<|py|>", "<turn>").replace("<|/py|>", "<bos>"))
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.tool_form is ToolForm.LLAMA


@pytest.mark.parametrize(
    ("plain", "written", "form"),
    [
        ("<think>\n\n</think>\n\n", TAGGED, ToolForm.HERMES),
        ("<|plain|>", f"<|python_tag|>{LLAMA}", ToolForm.LLAMA),
    ],
)
def test_what_only_a_plain_answer_begins_with_may_begin_as_a_call(plain: str, written: str, form: ToolForm) -> None:
    chat = CHAT.replace("{{ m.content }}", f"{{% if not m.tool_calls %}}{plain}{{% endif %}}{{{{ m.content }}}}")
    template = ASKED + chat.replace("CALL", written).replace("THINK", "")
    assert ChatTemplate(template, {}).tool_form is form
    hidden = ["<|start|>", "<|end|>", "<|eot|>", "<tool_call>", "</tool_call>", "<|python_tag|>"]
    assert ChatTemplate(template, {}, hidden).tool_form is form


def test_a_template_that_cannot_be_tried_is_taken_by_what_its_source_shows() -> None:
    refusing = "{{ tools }}<tool_call>{% if messages | length < 3 %}{{ raise_exception('too few') }}{% endif %}"
    assert ChatTemplate(refusing, {}).tool_form is ToolForm.HERMES
    looping = "{{ tools }}<tool_call>{% for i in range(10 ** 9) %}{% endfor %}"
    assert ChatTemplate(looping, {}).tool_form is ToolForm.HERMES
