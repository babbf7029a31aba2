"""Where the tokens of a prompt stand in its text, and by which of its model's templates a chat is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, processors
from transformers import AutoTokenizer

from router.errors import ApiError
from router.generation import ServedModel
from router.schema.prompts import Prompt, chat_prompt, chat_text
from router.schema.request_schema import ChatBody
from router.schema.structured import tools_of
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import parser_of
from tests.fakes import tiny_tokenizer

BUNDLED = Path(__file__).parents[4] / "models" / "target"


def sentencepiece() -> Tokenizer:
    """As Llama 2's: a space before every text and behind every special token, one of which goes before the text."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "▁a", "▁b", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("▁", "b")], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize(
    ("text", "starts"),
    [("ab b", [0, 0, 1, 2]), ("a🎉 b", [0, 0, 1, 1, 1, 1, 2]), (" ab", [0, 0, 1, 2]), ("a</s>b b", [0, 0, 1, 5, 6])],
)
def test_a_text_has_its_tokens_where_they_are_written(text: str, starts: list[int]) -> None:
    tokenizer = sentencepiece()
    tokens = tokenizer.encode(text, special=True)
    assert [*Prompt(tokens, text).starts(tokenizer)] == starts
    if text.startswith(" "):
        return  # Its first token has no text of its own where a decoder strips the first of two spaces.
    assert [*Prompt(tokens[1:], text).starts(tokenizer)] == starts[1:]
    if tokenizer.decode(tokens) == text:
        assert [*Prompt(tokens).starts(tokenizer)] == starts


DEFAULT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOOL_USE = "{{ tools | tojson }}<tool_call>" + DEFAULT
FILE, TOOL_FILE = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
ENTRIES = [{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": TOOL_USE}]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    ("configured", "files"),
    [
        (ENTRIES, {}),
        (None, {FILE: DEFAULT, TOOL_FILE: TOOL_USE}),
        (DEFAULT, {TOOL_FILE: TOOL_USE}),
        (ENTRIES, {FILE: TOOL_USE}),
        (TOOL_USE, {}),
    ],
)
def test_a_chat_with_tools_is_written_by_the_template_that_transformers_takes(
    tmp_path: Path, configured: object, files: dict[str, str]
) -> None:
    config = json.loads((BUNDLED / "tokenizer_config.json").read_text()) | {"chat_template": configured}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).symlink_to(BUNDLED / name)
    for name, template in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(template)
    tokenizer, theirs = Tokenizer.load(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)

    def written(**fields: Any) -> str:
        body = ChatBody.read(CHAT | fields)
        model = ServedModel("", tokenizer.size, 4096, 0)
        return tokenizer.decode(chat_prompt(body, tokenizer, model, tools_of(body, tokenizer)).tokens, frozenset())

    assert written(tools=TOOLS) == theirs.apply_chat_template(CHAT["messages"], tools=TOOLS, tokenize=False)
    if configured == DEFAULT:  # which the file beside it replaces, so that nothing is left for chats without tools
        with pytest.raises(ApiError, match="no chat template"):
            written()
        return
    plain = theirs.apply_chat_template(CHAT["messages"], tokenize=False)
    assert written() == written(tools=TOOLS, tool_choice="none") == plain
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [*CHAT["messages"], {"role": "assistant", "tool_calls": [called]}]
    history += [{"role": "tool", "tool_call_id": "1", "content": "5"}]
    last = written(messages=history, tools=TOOLS, tool_choice="none")
    apart = tokenizer.tool_template is not None  # the other one has no place for calls
    assert (last == written(messages=history, tools=TOOLS)) is apart


GUARD = (
    "{% for m in messages %}{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ m['role'] }}: {{ part['text'] | trim }}\n{% endfor %}{% endfor %}"
)
"""As Llama Guard 3 1B reads contents."""
FIRST = "{% for m in messages %}{{ m.role + ': ' + m.content[0].text + '\n' }}{% endfor %}"
"""A template that raises where a content is a string."""


@pytest.mark.parametrize("template", [DEFAULT, GUARD, FIRST])
@pytest.mark.parametrize("content", ["How so?", [{"type": "text", "text": "How so?"}]])
def test_what_is_said_is_written_also_by_a_template_that_reads_contents_in_parts(template: str, content: Any) -> None:
    said = [{"role": "user", "content": content}, {"role": "assistant", "content": "Be"}]
    tokenizer = tiny_tokenizer(template)

    def written(**fields: Any) -> str:
        body = ChatBody.read({"messages": said} | fields)
        return chat_text(body, tokenizer.template(tools=False), tools_of(body, tokenizer))

    assert written() == "user: How so?\nassistant: Be\n"
    assert written(continue_final_message=True) == "user: How so?\nassistant: Be"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('never') }}", "{{ 1 / 0 }}", "{{ messages[7].content[0] }}", ""]
)
def test_a_template_that_can_write_no_message_is_read_all_the_same(template: str) -> None:
    assert tiny_tokenizer(template).chat_template is not None


ONE_CALL = (
    "{{ tools | tojson }}\n{% for m in messages %}"
    "{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
    '{{ "\n" }}{% endfor %}'
)
"""As Llama 3.1 takes calls."""
CALLED = '{"name": "f", "parameters": {"x": %s}}'


@pytest.mark.parametrize("template", [ONE_CALL, ONE_CALL.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")])
def test_calls_that_were_answered_are_taken_back_by_a_template_of_one_call_a_message(template: str) -> None:
    tokenizer = tiny_tokenizer(template)
    asked = tools_of(ChatBody.read(CHAT | {"tools": TOOLS}), tokenizer)
    assert asked.form is not None
    parser = parser_of(asked.form, {"f"}, several=asked.several)
    found = parser.push("; ".join(CALLED % number for number in range(3))).then(parser.finish())
    calls = [
        {"id": f"c{number}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for number, call in enumerate(found.calls)
    ]
    answers = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("c2", "c0", "other")]
    history = [*CHAT["messages"], {"role": "assistant", "content": "so", "tool_calls": calls}, *answers]
    body = ChatBody.read({"messages": [*history, *CHAT["messages"]], "tools": TOOLS})
    _, _, *lines = chat_text(body, tokenizer.template(tools=True), asked).splitlines()
    first, second, third = (CALLED % number for number in range(3))
    ends = ["tool: c2", "tool: other", "user: hi"]
    assert lines == [f"assistant: so{first}", "tool: c0", f"assistant: {second}", f"assistant: {third}", *ends]


def test_calls_stay_together_where_a_template_writes_several() -> None:
    template = ONE_CALL.replace("!= 1", "> 99")
    calls = [{"id": one, "function": {"name": "f", "arguments": "{}"}} for one in "ab"]
    history = [*CHAT["messages"], {"role": "assistant", "content": "so", "tool_calls": calls}]
    tokenizer, body = tiny_tokenizer(template), ChatBody.read({"messages": history, "tools": TOOLS})
    text = chat_text(body, tokenizer.template(tools=True), tools_of(body, tokenizer))
    assert text.endswith('\nassistant: so{"name": "f", "parameters": {}}{"name": "f", "parameters": {}}\n')
