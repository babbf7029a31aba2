"""What answers show beside their text, over a fake router: log-probabilities, echo, token ids, tool calls."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from protos.paceline.v1 import worker_pb2 as pb
from router.generation import Committed, Generation, ServedModel
from router.http.api import build_app
from router.text.tokenizer import Tokenizer
from speculation.events import StepMetadata
from speculation.messages import Verification
from tests import fakes
from tests.fakes import EOS, TURN, FakeGenerator, FakeTokenizers, commits, logprobs_of, metadata_of, tiny_tokenizer
from transport.codec import decode_from_worker

PATHS = ["/v1/completions", "/v1/chat/completions"]
TEXT = "hello wörld, 世界 🎉 the fox z\n"
TOOL_TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call>{}</tool_call>{% endif %}"
    "{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LLAMA_TEMPLATE = TOOL_TEMPLATE.replace("<tool_call>{}</tool_call>", '{"name": , "parameters": }')
LLAMA_TEMPLATE = LLAMA_TEMPLATE.replace("<tool_call>", "").replace("</tool_call>", "")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@cache
def tokenizer(template: str | None = TOOL_TEMPLATE) -> Tokenizer:
    return tiny_tokenizer(template)


def encode(text: str) -> tuple[int, ...]:
    return tokenizer().encode(text, special=False)


def generator(tokens: tuple[int, ...], sizes: tuple[int, ...] = (1, 4, 2)) -> FakeGenerator:
    model = ServedModel("tiny", tokenizer().size, 2048, tokenizer().digest)
    return FakeGenerator(lambda _: commits(tokens, sizes), model=model)


async def post(
    fake: FakeGenerator, path: str, fields: dict[str, Any], template: str | None = TOOL_TEMPLATE
) -> httpx.Response:
    default = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    app = build_app(fake, FakeTokenizers(tokenizer(template)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://paceline") as client:
        response = await client.post(path, json=default | {"max_tokens": 500} | fields)
    assert fake.running == 0
    return response


def joined(response: httpx.Response) -> list[dict[str, Any]]:
    """The choices of a stream, put together as a client does, with what stands beside them in the first of each."""
    parts = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert parts.pop() == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for part in map(json.loads, parts):
        for choice in part["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "calls": [], "logprobs": {}, "token_ids": []})
            delta = choice.get("delta", choice)
            whole["text"] += delta.get("text", "") + (delta.get("content") or "")
            assert [call["index"] for call in delta.get("tool_calls", [])] == [
                *range(len(whole["calls"]), len(whole["calls"]) + len(delta.get("tool_calls", [])))
            ]
            whole["calls"] += [call["function"] for call in delta.get("tool_calls", [])]
            whole["token_ids"] += choice.get("token_ids", [])
            for name, items in (choice["logprobs"] or {}).items():
                if items:
                    whole["logprobs"].setdefault(name, []).extend(items)
            whole["finish"] = choice["finish_reason"]
            whole["prompt_ids"] = whole.get("prompt_ids") or choice.get(
                "prompt_token_ids", part.get("prompt_token_ids")
            )
    return [choices[index] for index in sorted(choices)]


def whole(response: httpx.Response) -> list[dict[str, Any]]:
    """The choices of an answer that is not streamed, in the same form."""
    body = response.json()
    found = []
    for choice in body["choices"]:
        message = choice.get("message", {})
        found.append(
            {
                "text": choice["text"] if "text" in choice else message["content"] or "",
                "calls": [call["function"] for call in message.get("tool_calls", [])],
                "logprobs": {k: v for k, v in (choice["logprobs"] or {}).items() if v},  # of none a stream says nothing
                "token_ids": choice.get("token_ids", []),
                "finish": choice["finish_reason"],
                "prompt_ids": choice.get("prompt_token_ids", body.get("prompt_token_ids")),
            }
        )
    return found


SAID = st.text(st.sampled_from("ab🎉世é \n<z"), max_size=25)


@settings(max_examples=60, derandomize=True)
@given(
    text=SAID,
    stop=st.lists(st.text(st.sampled_from("ab🎉世é \n<"), min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    path=st.sampled_from(PATHS),
    kept=st.booleans(),
    special=st.booleans(),
    min_tokens=st.integers(0, 8),
    echo=st.booleans(),
    ended=st.booleans(),
)
async def test_streaming_equals_not_streaming(
    text: str,
    stop: list[str],
    sizes: list[int],
    path: str,
    *,
    kept: bool,
    special: bool,
    min_tokens: int,
    echo: bool,
    ended: bool,
) -> None:
    chat = "chat" in path
    tokens = (*encode(text), *([EOS] if ended else encode("🎉")[:2]))
    fields: dict[str, Any] = {
        "stop": stop,
        "include_stop_str_in_output": kept,
        "skip_special_tokens": not special,
        "return_token_ids": True,
        "max_tokens": max(len(tokens), min_tokens),
        "min_tokens": min_tokens,
        "logprobs": True if chat else 2,
    }
    fields |= {"top_logprobs": 2} if chat else {"echo": echo}
    if len(tokens) < fields["max_tokens"]:
        tokens += encode("a") * (fields["max_tokens"] - len(tokens))
    response = await post(generator(tokens, (1,)), path, fields)
    (plain,) = whole(response)
    assert whole(await post(generator(tokens, tuple(sizes)), path, fields)) == [plain]
    assert joined(await post(generator(tokens, tuple(sizes)), path, fields | {"stream": True})) == [plain]
    logprobs = plain["logprobs"]
    entries = logprobs.get("content" if chat else "tokens", [])
    counted = response.json()["usage"]["completion_tokens"]
    assert tuple(plain["token_ids"]) == tokens[:counted]
    own = len(entries) - (len(plain["prompt_ids"]) if echo and not chat else 0)
    assert own <= counted  # fewer where a stop string does not show
    assert own == counted or (stop and not kept and plain["finish"] == "stop")
    if chat:
        content = bytes(byte for entry in entries for byte in entry["bytes"] or ()).decode(errors="replace")
        assert content.startswith(plain["text"]) or special


@pytest.mark.parametrize("sizes", [(1,), (3, 2), (50,)])
async def test_a_stop_string_may_be_kept(sizes: tuple[int, ...]) -> None:
    fields = {"stop": ["世x"], "include_stop_str_in_output": True, "logprobs": 0}
    (choice,) = (await post(generator((*encode("abc世xyz"), EOS), sizes), PATHS[0], fields)).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc世x", "stop")
    assert choice["logprobs"]["tokens"][-1] == "x"


@pytest.mark.parametrize("sizes", [(1,), (3, 2), (50,)])
async def test_no_stop_string_counts_before_min_tokens(sizes: tuple[int, ...]) -> None:
    fields = {"stop": ["b"], "min_tokens": 2}
    (choice,) = (await post(generator((*encode("abcab"), EOS), sizes), PATHS[0], fields)).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abca", "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("min_tokens", range(6))
async def test_a_stop_string_that_begins_before_min_tokens_counts_where_it_ends_behind(
    min_tokens: int, stream: bool
) -> None:
    fields = {"stop": "XYZ", "min_tokens": min_tokens, "stream": stream}
    for sizes in ((1,), (3, 2), (50,)):
        response = await post(generator((*encode("abXYZc"), EOS), sizes), PATHS[0], fields)
        (choice,) = (joined if stream else whole)(response)
        assert choice["text"] == ("ab" if min_tokens < 5 else "abXYZc")


# Log-probabilities


async def test_logprobs_of_a_chat() -> None:
    tokens = (*encode(TEXT), EOS)
    body = (await post(generator(tokens), PATHS[1], {"logprobs": True, "top_logprobs": 3})).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == len(tokens) == body["usage"]["completion_tokens"]
    assert b"".join(bytes(entry["bytes"] or ()) for entry in content).decode() == TEXT
    for token, entry in zip(tokens, content, strict=True):
        told = logprobs_of(token, 3)
        assert entry["logprob"] == max(told.logprob, -9999.0)
        assert [top["logprob"] for top in entry["top_logprobs"]] == list(told.logprobs)
    assert content[-1] == content[-1] | {"token": "<eos>", "bytes": None}
    assert {entry["token"] for entry in content} >= {"bytes:\\xf0", "z"}
    assert min(entry["logprob"] for entry in content) == -9999.0


async def test_logprobs_of_a_completion() -> None:
    tokens = (*encode(TEXT), EOS)
    (choice,) = (await post(generator(tokens), PATHS[0], {"logprobs": 1})).json()["choices"]
    logprobs = choice["logprobs"]
    assert [logprobs["text_offset"][i] for i in (0, -1)] == [0, len(TEXT)]
    for token, name, own, top in zip(
        tokens, logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[name] == own
        assert len(top) == (2 if token % 3 == 0 else 1)
    for name, start in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert name.startswith("bytes:") or name == "<eos>" or TEXT.startswith(name, start)


async def test_no_token_behind_a_stop_string_is_shown() -> None:
    (choice,) = (
        await post(generator((*encode("abc世xyz"), EOS), (50,)), PATHS[0], {"logprobs": 0, "stop": "世x"})
    ).json()["choices"]
    assert choice["text"] == "abc" == "".join(choice["logprobs"]["tokens"])


@pytest.mark.parametrize("path", PATHS)
async def test_token_ids_are_all_that_were_drawn_though_a_stop_string_does_not_show(path: str) -> None:
    tokens, fields = encode("abc世xyz"), {"return_token_ids": True, "stop": "世x"}
    drawn = list(encode("abc世x"))
    for sizes in ((1,), (50,)):
        response = await post(generator((*tokens, EOS), sizes), path, fields)
        (choice,) = whole(response)
        assert (choice["text"], choice["token_ids"]) == ("abc", drawn)
        assert response.json()["usage"]["completion_tokens"] == len(drawn)
        assert joined(await post(generator((*tokens, EOS), sizes), path, fields | {"stream": True})) == [choice]


async def test_tokens_can_be_named_by_their_ids() -> None:
    fields = {"logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    tokens = (*encode("fox"), EOS)
    (choice,) = (await post(generator(tokens), PATHS[0], fields)).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens]
    assert choice["token_ids"] == list(tokens)
    assert choice["prompt_token_ids"] == [0, *encode("hi")]


async def test_a_target_that_tells_nothing_is_an_error_and_not_a_zero() -> None:
    fake = generator((*encode("fox"), EOS))
    silent = FakeGenerator(fake._script, model=next(iter(fake.models.values())))

    async def generate(generation: Any) -> Any:
        async for item in FakeGenerator.generate(silent, generation):
            yield Committed(item.tokens, 0, 0) if isinstance(item, Committed) else item

    silent.generate = generate  # type: ignore[method-assign]
    response = await post(silent, PATHS[0], {"logprobs": 1})
    assert response.status_code == 500
    assert "log-probabilities" in response.json()["error"]["message"]


# The prompt


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_tokens_is_answered_at_once(stream: bool) -> None:
    fake = generator((EOS,))
    response = await post(
        fake, PATHS[0], {"prompt": ["a<eos>b", [5, 6]], "echo": True, "max_tokens": 0, "stream": stream}
    )
    assert [choice["text"] for choice in (joined if stream else whole)(response)] == [
        "a<eos>b",
        tokenizer().decode([5, 6]),
    ]
    assert fake.generations == []


async def test_echo_with_logprobs_scores_the_prompt_alone() -> None:
    fake = generator((*encode("never shown"), EOS))
    body = (await post(fake, PATHS[0], {"prompt": "héllo fox", "echo": True, "max_tokens": 0, "logprobs": 1})).json()
    (choice,) = body["choices"]
    (generation,) = fake.generations
    logprobs = choice["logprobs"]
    assert choice["text"] == "héllo fox"
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    expected = [max(logprobs_of(token, 1).logprob, -9999.0) for token in generation.prompt[1:]]
    assert logprobs["token_logprobs"][1:] == expected
    for name, start in zip(logprobs["tokens"][1:], logprobs["text_offset"][1:], strict=True):
        assert name.startswith("bytes:") or "héllo fox".startswith(name, start)


async def test_echo_goes_before_the_text_and_moves_its_offsets() -> None:
    fields = {"prompt": "a🎉b", "echo": True, "logprobs": 0}
    (choice,) = (await post(generator((*encode("cd"), EOS)), PATHS[0], fields)).json()["choices"]
    assert choice["text"] == "a🎉bcd"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("stream", [False, True])
async def test_special_tokens_show_in_a_prompt_that_is_given_as_tokens_as_they_do_in_the_text(stream: bool) -> None:
    fields = {"prompt": [TURN, *encode("ab")], "echo": True, "logprobs": 0, "stream": stream}
    for skipped, text, starts in ((True, "abcd", [0, 0, 1, 2, 2, 3, 4]), (False, "<turn>ab<turn>cd", [0, 6, 7, 8, 14])):
        fake = generator((TURN, *encode("cd"), EOS))
        response = await post(fake, PATHS[0], fields | {"skip_special_tokens": skipped})
        (choice,) = (joined if stream else whole)(response)
        assert choice["text"] == text
        assert choice["logprobs"]["text_offset"][: len(starts)] == starts


@pytest.mark.parametrize("path", PATHS)
async def test_prompt_logprobs_are_vllms(path: str) -> None:
    fake = generator((*encode("x"), EOS))
    body = (await post(fake, path, {"prompt_logprobs": 2})).json()
    found = body["prompt_logprobs"] if "chat" in path else body["choices"][0]["prompt_logprobs"]
    prompt = fake.generations[0].prompt
    assert len(found) == len(prompt)
    assert found[0] is None
    for token, entry in zip(prompt[1:], found[1:], strict=True):
        assert len(entry) == (3 if token % 3 == 0 else 2)
        assert entry[str(token)]["rank"] == (None if token % 3 == 0 else 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_that_a_target_told_wrong_of_a_prompt_end_the_request(
    monkeypatch, stream: bool
) -> None:
    """They are checked where they are shown, beside the event loop."""

    def told(commit: Committed, generation: Generation, *, first: bool) -> StepMetadata:
        wire = pb.Verification(prompt_logprobs=[pb.Logprobs(tokens=[5])] * (len(generation.prompt) - 1))
        said = decode_from_worker(pb.FromWorker(verified=wire).SerializeToString())
        assert isinstance(said, Verification)
        return replace(metadata_of(commit, generation, first=first), prompt_logprobs=said.prompt_logprobs)

    monkeypatch.setattr(fakes, "metadata_of", told)
    fields = {"echo": True, "logprobs": 0, "stream": True} if stream else {"prompt_logprobs": 0}
    response = await post(generator((*encode("x"), EOS)), PATHS[0], {"prompt": "fox"} | fields)
    assert "wrong log-probabilities of the prompt: logprobs has 0 entries for 1 tokens" in response.text
    assert response.status_code == (200 if stream else 500)


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(1, 5), (0, 2), (3, 1)])
async def test_what_is_told_of_an_echoed_prompt_is_what_each_field_asks_for(
    logprobs: int, prompt_logprobs: int
) -> None:
    async def told(**fields: int) -> dict[str, Any]:
        asked = {"prompt": "fox", "echo": True} | fields
        (choice,) = (await post(generator((*encode("cd"), EOS)), PATHS[0], asked)).json()["choices"]
        return dict(choice)

    both = await told(logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    assert both["logprobs"] == (await told(logprobs=logprobs))["logprobs"]
    assert both["prompt_logprobs"] == (await told(prompt_logprobs=prompt_logprobs))["prompt_logprobs"]


async def test_variables_of_the_template_can_be_set() -> None:
    template = "{{ messages[0].content }}{{ thinking }}{{ reasoning_effort }}"
    fake = generator((*encode("x"), EOS))
    fields = {"chat_template_kwargs": {"thinking": "deep"}, "reasoning_effort": "low"}
    assert (await post(fake, PATHS[1], fields, template)).status_code == 200
    assert tokenizer(template).decode(fake.generations[0].prompt) == "hideeplow"


# Tool calls


def call(name: str = "weather", **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"


SURROGATE = '<tool_call>{"name": "\\ud800"}</tool_call>'
CALLS: list[tuple[str, str, str, list[str], str]] = [
    (TOOL_TEMPLATE, "Let me see.\n" + call(city="Zürich"), "Let me see.", ['{"city": "Zürich"}'], "tool_calls"),
    (TOOL_TEMPLATE, f"{call(a=1)}\n{call(a=2)}\n", "", ['{"a": 1}', '{"a": 2}'], "tool_calls"),
    (TOOL_TEMPLATE, call(a={"b": [1]}).removesuffix("</tool_call>"), "", ['{"a": {"b": [1]}}'], "tool_calls"),
    (TOOL_TEMPLATE, "a <tool_call>{nonsense}</tool_call> b", "a <tool_call>{nonsense}</tool_call> b", [], "stop"),
    (TOOL_TEMPLATE, "1 < 2 and <tool", "1 < 2 and <tool", [], "stop"),
    (TOOL_TEMPLATE, '<tool_call>{"name": "x", "argu', '<tool_call>{"name": "x", "argu', [], "stop"),
    (
        TOOL_TEMPLATE,
        '<tool_call>{"name": "\\ud800"}</tool_call>',
        '<tool_call>{"name": "\\ud800"}</tool_call>',
        [],
        "stop",
    ),
    (LLAMA_TEMPLATE, '{"name": "weather", "parameters": {"a": 1}}', "", ['{"a": 1}'], "tool_calls"),
    (LLAMA_TEMPLATE, ' {"name": "weather"}; {"name": "weather", "parameters": {}}', "", ["{}", "{}"], "tool_calls"),
    (LLAMA_TEMPLATE, '{"type": "function", "name": "weather", "arguments": {"a": 1}}', "", ['{"a": 1}'], "tool_calls"),
    (LLAMA_TEMPLATE, '{"name": "Ada", "email": "a@b.c"}', '{"name": "Ada", "email": "a@b.c"}', [], "stop"),
    (LLAMA_TEMPLATE, '{"name": "Ada"}', '{"name": "Ada"}', [], "stop"),
    (LLAMA_TEMPLATE, '{"name": ["weather"]}', '{"name": ["weather"]}', [], "stop"),
    (LLAMA_TEMPLATE, '{"name": "weather", "wind": 3}', '{"name": "weather", "wind": 3}', [], "stop"),
    (LLAMA_TEMPLATE, '{"name": "weather"}; {"name": "x"}', '{"name": "weather"}; {"name": "x"}', [], "stop"),
    (LLAMA_TEMPLATE, " \n", " \n", [], "stop"),
    (LLAMA_TEMPLATE, "It is {warm}.", "It is {warm}.", [], "stop"),
    (LLAMA_TEMPLATE, '{"name": "weather", "para', '{"name": "weather", "para', [], "stop"),
    (LLAMA_TEMPLATE, "[" * 5 + '{"name"', "[" * 5 + '{"name"', [], "stop"),
]


@pytest.mark.parametrize(("template", "text", "content", "arguments", "finish"), CALLS)
@pytest.mark.parametrize("sizes", [(1,), (3, 5), (400,)])
async def test_tool_calls(
    template: str, text: str, content: str, arguments: list[str], finish: str, sizes: tuple[int, ...]
) -> None:
    tokens, fields = (*encode(text), EOS), {"tools": [WEATHER]}
    (answer,) = whole(await post(generator(tokens, sizes), PATHS[1], fields, template))
    assert (answer["text"], answer["finish"]) == (content, finish)
    assert [one["arguments"] for one in answer["calls"]] == arguments
    (streamed,) = joined(await post(generator(tokens, sizes), PATHS[1], fields | {"stream": True}, template))
    assert streamed == answer


async def test_without_tools_nothing_is_searched() -> None:
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        fake = generator((*encode(call()), EOS))
        (answer,) = whole(await post(fake, PATHS[1], fields))
        assert answer["text"] == call()
        assert "weather" not in tokenizer().decode(fake.generations[0].prompt)


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, LLAMA_TEMPLATE])
async def test_an_answer_may_end_with_its_first_call(template: str) -> None:
    text = call(a=1) + call(a=2) if template == TOOL_TEMPLATE else '{"name": "weather"};{"name": "weather"}'
    fields = {"tools": [WEATHER], "parallel_tool_calls": False}
    (answer,) = whole(await post(generator((*encode(text), EOS)), PATHS[1], fields, template))
    assert (len(answer["calls"]), answer["finish"], answer["text"]) == (1, "tool_calls", "")


async def test_calls_and_their_results_go_into_the_prompt() -> None:
    past = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [past]},
        {"role": "tool", "tool_call_id": "c1", "content": "warm"},
    ]
    fake = generator((*encode("fine"), EOS))
    await post(fake, PATHS[1], {"messages": messages, "tools": [WEATHER]})
    prompt = tokenizer().decode(fake.generations[0].prompt)
    assert '{"name": "weather", "arguments": {"city": "Bern"}}' in prompt
    assert "tool: warm" in prompt
    assert json.dumps(WEATHER) in prompt


FORCED: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}]


@pytest.mark.parametrize("choice", FORCED)
@pytest.mark.parametrize(
    ("template", "written"),
    [(TOOL_TEMPLATE, call(city="Bern")), (LLAMA_TEMPLATE, '{"name": "weather", "parameters": {"city": "Bern"}}')],
)
async def test_a_call_can_be_made_certain(choice: Any, template: str, written: str) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": True}}
    fake = generator((*encode(written), EOS))
    (answer,) = whole(await post(fake, PATHS[1], {"tools": [tool], "tool_choice": choice}, template))
    assert answer["finish"] == "tool_calls"
    matcher = LLMatcher(LLTokenizer("byte"), fake.generations[0].request_options.grammar)
    assert matcher.try_consume_tokens([*written.encode()]) == len(written.encode())
    assert matcher.is_accepting()
    other = LLMatcher(LLTokenizer("byte"), fake.generations[0].request_options.grammar)
    wrong = written.replace("city", "town").encode()
    assert other.try_consume_tokens([*wrong]) < len(wrong)


async def test_a_form_of_the_answer_leaves_tools_to_be_called() -> None:
    fake = generator((*encode(call(city="Bern")), EOS))
    fields = {"tools": [WEATHER], "response_format": {"type": "json_object"}}
    (answer,) = whole(await post(fake, PATHS[1], fields))
    assert (answer["finish"], len(answer["calls"])) == ("tool_calls", 1)
    for text, fits in ((call(city="Bern"), True), ('{"city": "Bern"}', True), ("Bern", False)):
        matcher = LLMatcher(LLTokenizer("byte"), fake.generations[0].request_options.grammar)
        assert (matcher.try_consume_tokens([*text.encode()]) == len(text.encode())) is fits


PAST: dict[str, Any] = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
ENDLESS: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    },
}
ENDLESS_AT = "tools[0].function.parameters"
BAD_TOOLS: list[tuple[dict[str, Any], str | None, str, str]] = [
    ({"tools": [WEATHER]}, "{{ messages }}", "tools", "no place for tools"),
    ({"tools": [WEATHER]}, "{{ messages }}{{ tools }}", "tools", "no form of calls"),
    ({"tools": [WEATHER]}, None, "messages", "no chat template"),
    ({"tools": {}}, TOOL_TEMPLATE, "tools", "array"),
    ({"tools": [WEATHER] * 129}, TOOL_TEMPLATE, "tools", "at most 128"),
    ({"tools": [{"type": "retrieval"}]}, TOOL_TEMPLATE, "tools[0].type", "function"),
    ({"tools": [{"type": "function"}]}, TOOL_TEMPLATE, "tools[0].function", "missing"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        TOOL_TEMPLATE,
        "tools[0].function.name",
        "letters",
    ),
    ({"tools": [WEATHER], "tool_choice": "maybe"}, TOOL_TEMPLATE, "tool_choice", "maybe"),
    ({"tool_choice": "required"}, TOOL_TEMPLATE, "tool_choice", "no tools"),
    (
        {"tools": [ENDLESS | {"function": ENDLESS["function"] | {"strict": True}}]},
        TOOL_TEMPLATE,
        ENDLESS_AT,
        "recurses",
    ),
    (
        {"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"},
        TOOL_TEMPLATE,
        "tool_choice",
        "another form",
    ),
    (
        {"tools": [ENDLESS], "tool_choice": "required"},
        TOOL_TEMPLATE,
        "tools[0].function.parameters",
        "recurses",
    ),
    (
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        TOOL_TEMPLATE,
        "tool_choice.function.name",
        "one of tools",
    ),
    ({"messages": [PAST]}, "{{ messages }}", "messages[0].tool_calls", "no place for tools"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}]},
        TOOL_TEMPLATE,
        "messages[0].tool_calls[0].function.arguments",
        "JSON object",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}]}
            ]
        },
        TOOL_TEMPLATE,
        "messages[0].tool_calls[0].function.arguments",
        "JSON object",
    ),
    ({"messages": [PAST | {"role": "user"}]}, TOOL_TEMPLATE, "messages[0].tool_calls", "assistant"),
    ({"messages": [{"role": "tool", "content": "x"}]}, TOOL_TEMPLATE, "messages[0].tool_call_id", "missing"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        TOOL_TEMPLATE,
        "messages[0].content[0].type",
        "reads text only",
    ),
]


@pytest.mark.parametrize(("fields", "template", "param", "text"), BAD_TOOLS)
async def test_bad_tools_are_refused_by_name(
    fields: dict[str, Any], template: str | None, param: str, text: str
) -> None:
    response = await post(generator((EOS,)), PATHS[1], fields, template)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert text in error["message"]


async def test_an_event_is_one_line_however_lines_are_told_apart() -> None:
    text = "a\x85b\u2028c\u2029d\x0b\x0c\x1c\x1d\x1ee\xc2\u2085"
    for path in PATHS:
        response = await post(generator((*encode(text), EOS)), path, {"stream": True})
        assert all(line.startswith("data: ") for line in response.content.decode().splitlines() if line)
        (answer,) = joined(response)
        assert answer["text"] == text


@pytest.mark.parametrize("path", PATHS)
async def test_the_usage_so_far_may_come_with_every_chunk(path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await post(generator((*encode(TEXT), EOS)), path, {"stream": True, "stream_options": options})
    chunks = [json.loads(part.removeprefix("data: ")) for part in response.text.split("\n\n")[:-2]]
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counted == sorted(counted)
    assert (counted[0], counted[-1]) == (1, len(encode(TEXT)) + 1)
    assert len(set(counted)) > 5
