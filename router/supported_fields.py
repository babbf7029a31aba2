"""The rows of :mod:`router.field_table` that are carried out, and those that are labels."""

from __future__ import annotations

from typing import Any

from router.field_bounds import (
    CACHE_MODES,
    CACHE_RETENTIONS,
    CACHE_TTLS,
    COMPLETION_MAX_TOKENS,
    EFFORTS,
    FUNCTION_NAME,
    LEAST_REPETITION_PENALTY,
    LEAST_TIMEOUT,
    MAX_ALLOWED,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASED,
    MAX_CHOICES,
    MAX_DRAFT_DEPTH,
    MAX_LABEL,
    MAX_LOGPROBS,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MAX_TOOLS,
    MAX_TOP_K,
    MIN_SEED,
    MOST_TIMEOUT,
    ROLES,
    SERVICE_TIERS,
)
from router.field_row import Row, Schema, Support
from speculation.messages import MAX_PRIORITY, Rule, Schedule, Source
from speculation.sources.registry import NAME


def _integer(low: int, high: int | None = None) -> Schema:
    return {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _share() -> Schema:
    return {"type": "number", "exclusiveMinimum": 0, "maximum": 1}


def _strings(most: int, longest: int) -> Schema:
    return {"type": "array", "maxItems": most, "items": {"type": "string", "minLength": 1, "maxLength": longest}}


def _tokens(most: int | None = None, least: int = 0) -> Schema:
    bounds = ({} if most is None else {"maxItems": most}) | ({"minItems": least} if least else {})
    return {"type": "array", **bounds, "items": {"type": "integer", "minimum": 0}}


def _one_of(values: Any) -> Schema:
    return {"enum": [str(value) for value in values]}


_STOPS = _strings(MAX_STOPS, MAX_STOP_CHARACTERS)
_BOOLEAN: Schema = {"type": "boolean"}
_STRING: Schema = {"type": "string"}
_SOURCES: Schema = {
    "title": f"array of {', '.join(f'`{source}`' for source in Source)}, and names that the operator registered",
    "type": "array",
    "items": {"anyOf": [_one_of(Source), {"type": "string", "pattern": f"^{NAME.pattern}$"}]},
}
_OBJECT: Schema = {"type": "object"}
_JSON_SCHEMA: Schema = {"title": "a JSON Schema, as such or in a string"}
_LABEL: Schema = {"type": "string", "maxLength": MAX_LABEL}
_CHOICES: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_CHOICES,
    "items": {"type": "string", "minLength": 1},
}
_TEXT_PARTS: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": _STRING, "prompt_cache_breakpoint": {}},
        "required": ["type", "text"],
        "additionalProperties": False,
    },
}
_PROMPT: Schema = {
    "title": "text, token ids, or an array of either",
    "anyOf": [
        {"type": "string", "minLength": 1},
        _tokens(least=1),
        {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string", "minLength": 1}, _tokens(least=1)]}},
    ],
}
_TOOL_CHOICE: Schema = {
    "title": "`none`, `auto`, `required`, or `type` and `function` with its `name`",
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": _STRING}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
    ],
}
_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": f"^{FUNCTION_NAME.pattern}$"},
                "description": _STRING,
                "parameters": _OBJECT,
                "strict": _BOOLEAN,
            },
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
_CALL: Schema = {
    "type": "object",
    "properties": {
        "id": _STRING,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": _STRING, "arguments": _STRING, "parsed_arguments": {}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["function"],
    "additionalProperties": False,
}

_WHAT = (
    Row("model", _STRING, "Which of the served models.", "the only one, where there is one"),
    Row(
        "prompt",
        _PROMPT,
        "What to continue; together with `n` at most as many texts as the server allows.",
        examples=("Once upon a time", [5, 6, 7], ["One", "Two"], [[5, 6], [7]]),
        where="completion",
        required=True,
    ),
    Row(
        "messages",
        {"type": "array", "minItems": 1},
        "The conversation, put into the model's chat template.",
        where="chat",
        required=True,
    ),
    Row("messages[].role", _one_of(ROLES), "Who speaks; `developer` is `system`.", where="chat", required=True),
    Row(
        "messages[].content",
        {"title": "string or array of text parts", "anyOf": [_STRING, _TEXT_PARTS, {"type": "null"}]},
        "What is said. Only an assistant that calls tools may say nothing.",
        where="chat",
        required=True,
    ),
    Row("messages[].name", _STRING, "For templates that show it.", where="chat"),
    Row(
        "messages[].tool_calls",
        {"type": "array", "items": _CALL},
        "What an assistant called: `id`, `type` and `function` with `name` and `arguments` (JSON in a string).",
        where="chat",
    ),
    Row("messages[].tool_call_id", _STRING, "Which call a message of role `tool` answers.", where="chat"),
    Row("n", _integer(1), "How many texts; at most as many as the server allows.", "1", (2,)),
    Row("best_of", _integer(1), "Only what `n` is: more texts than are returned are not written.", "n", (1,)),
)

_DRAWING = (
    Row("temperature", _number(0, MAX_TEMPERATURE), "0: the likeliest token, always.", "1", (0, 0.7)),
    Row("top_p", _share(), "Nucleus: the likeliest tokens that have this much probability.", "1", (0.9,)),
    Row("top_k", _integer(-1, MAX_TOP_K), "Only so many of the likeliest tokens; 0 or -1: all.", "0", (20,)),
    Row("min_p", _number(0, 1), "Only tokens with this share of the likeliest one's probability.", "0", (0.05,)),
    Row(
        "seed", _integer(MIN_SEED, MAX_SEED), "The same seed, the same text; see `speculation.rule`.", "a new one", (7,)
    ),
    Row(
        "presence_penalty",
        _number(-MAX_PENALTY, MAX_PENALTY),
        "Taken off the logit of every token generated before.",
        "0",
        (1.5,),
    ),
    Row(
        "frequency_penalty",
        _number(-MAX_PENALTY, MAX_PENALTY),
        "Taken off it for each time it was generated.",
        "0",
        (0.8,),
    ),
    Row(
        "repetition_penalty",
        _number(LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        "Divides positive logits of tokens in prompt or text, multiplies negative ones.",
        "1",
        (1.3,),
    ),
    Row(
        "logit_bias",
        {"type": "object", "maxProperties": MAX_BIASED, "additionalProperties": _number(-MAX_BIAS, MAX_BIAS)},
        "Token ids, as strings, and what is added to their logits.",
        "{}",
        ({"5": 4.5, "9": -100},),
    ),
    Row("allowed_token_ids", _tokens(MAX_ALLOWED, 1), "No other token is drawn.", "all", ([5, 6, 7, 8, 9, 10],)),
    Row(
        "bad_words",
        _strings(MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS),
        "Never written, neither as a text begins with them nor after a space.",
        "[]",
        (["the", "once"],),
    ),
)

_ENDING = (
    Row(
        "max_tokens",
        _integer(0),
        "How many tokens at most; within the model's context. 0 only with `echo`.",
        f"{COMPLETION_MAX_TOKENS}; chat: all that fit",
        (12,),
    ),
    Row(
        "max_completion_tokens",
        _integer(0),
        "The newer name of `max_tokens`; one of them. 0 only with `echo`.",
        examples=(12,),
        where="completion",
    ),
    Row("max_completion_tokens", _integer(1), "The newer name of `max_tokens`; one of them.", "", (12,), "chat"),
    Row("min_tokens", _integer(0), "No stop token or stop string counts before; at most `max_tokens`.", "0", (4,)),
    Row(
        "stop",
        {"anyOf": [_STOPS["items"], _STOPS]},
        "The text ends before the first of these.",
        "[]",
        ("e", ["\n", "it"]),
    ),
    Row("stop_token_ids", _tokens(MAX_STOP_TOKENS), "Tokens that end the text.", "[]", ([9, 10],)),
    Row("ignore_eos", _BOOLEAN, "The model's own stop tokens do not end the text.", "false", (True,)),
    Row("include_stop_str_in_output", _BOOLEAN, "The text ends after the stop string.", "false", (True,)),
)

_READING = (
    Row(
        "add_special_tokens",
        _BOOLEAN,
        "Put around text what the tokenizer puts there, such as a first token.",
        "true; chat: false, templates write it",
        (False, True),
    ),
    Row(
        "truncate_prompt_tokens",
        _integer(-1),
        "Only so many of the last tokens of the prompt; -1: as many as fit. Not 0.",
        "all",
        (3, -1),
    ),
    Row("add_generation_prompt", _BOOLEAN, "End the prompt where an assistant begins.", "true", (False,), "chat"),
    Row(
        "continue_final_message",
        _BOOLEAN,
        "Go on with the last message instead of a new one; needs `add_generation_prompt` false.",
        "false",
        where="chat",
    ),
    Row(
        "chat_template_kwargs",
        _OBJECT,
        "Values of variables that the model's chat template has.",
        "{}",
        where="chat",
    ),
    Row("reasoning_effort", _one_of(EFFORTS), "For templates that have such a variable.", "", ("none",), "chat"),
    Row(
        "tools",
        {"type": "array", "maxItems": MAX_TOOLS, "items": _TOOL},
        "Functions the model may call, where its chat template has a place for them and shows a form of calls that is "
        "known here (Hermes and Qwen, Llama 3).",
        "[]",
        where="chat",
    ),
    Row(
        "tools[].function.strict",
        _BOOLEAN,
        "True: whenever it is called, its arguments follow `parameters`. Text beside calls is free, but what begins as "
        "a call is one.",
        "false",
        where="chat",
    ),
    Row(
        "tool_choice",
        _TOOL_CHOICE,
        "`none`: tools are left out of the prompt. `required` or a name: the text is held to the form of a call, "
        "without idle whitespace.",
        "auto",
        ("none", "auto"),
        "chat",
    ),
    Row("parallel_tool_calls", _BOOLEAN, "False: the answer ends with its first call.", "true", (True, False), "chat"),
)

_ANSWER = (
    Row("stream", _BOOLEAN, "Send the text as it is decided, in server-sent events.", "false", (True,)),
    Row("stream_options", _OBJECT, "Only with `stream`."),
    Row("stream_options.include_usage", _BOOLEAN, "A last chunk with the usage.", "false", (True,)),
    Row(
        "stream_options.continuous_usage_stats",
        _BOOLEAN,
        "The usage so far in every chunk; with `include_usage`.",
        "false",
        (True,),
    ),
    Row(
        "stream_options.include_speculation", _BOOLEAN, "What was drafted and kept, with every chunk.", "false", (True,)
    ),
    Row(
        "logprobs",
        _integer(0, MAX_LOGPROBS),
        "Log-probabilities of the text's tokens, and of so many of the likeliest at each place. They are the model's "
        "own: before penalties, biases, temperature and filters.",
        "none",
        (0, 3),
        "completion",
    ),
    Row("logprobs", _BOOLEAN, "Log-probabilities of the text's tokens.", "false", (True,), "chat"),
    Row(
        "top_logprobs",
        _integer(0, MAX_LOGPROBS),
        "And of so many of the likeliest at each place; needs `logprobs`.",
        "0",
        where="chat",
    ),
    Row(
        "prompt_logprobs",
        _integer(0, MAX_LOGPROBS),
        "The same for the prompt, in vLLM's form; not with `stream`. The prompt is then computed without the cache.",
        "none",
        (2,),
    ),
    Row("echo", _BOOLEAN, "The answer begins with the prompt; `logprobs` too.", "false", (True,), "completion"),
    Row("return_token_ids", _BOOLEAN, "Token ids of prompt and text, as vLLM gives them.", "false", (True,)),
    Row(
        "return_tokens_as_token_ids",
        _BOOLEAN,
        "Tokens in log-probabilities are written `token_id:5`.",
        "false",
        (True,),
    ),
    Row("skip_special_tokens", _BOOLEAN, "False: special tokens show in the text.", "true", (False,)),
)

_FORM = (
    Row(
        "response_format",
        _OBJECT,
        "`text`, `json_object`, or `json_schema` with `json_schema.schema`. Only one of this, `structured_outputs` and "
        "`guided_*`. Where `tools` are offered, the model may write calls instead.",
        "text",
        (
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}},
        ),
    ),
    Row(
        "structured_outputs",
        _OBJECT,
        "Exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`, and how JSON is laid out.",
        "",
        ({"regex": "[a-z]+"}, {"choice": ["yes", "no"]}, {"json": {"type": "integer"}}),
    ),
    Row("structured_outputs.json", _JSON_SCHEMA, "The text is JSON that fits it.", "", ({"type": "null"}, "{}")),
    Row("structured_outputs.regex", _STRING, "The text matches it as a whole.", "", ("[a-z]{3}",)),
    Row("structured_outputs.choice", _CHOICES, "The text is one of these.", "", (["a", "b c"],)),
    Row(
        "structured_outputs.grammar",
        _STRING,
        "The text is one of this grammar's, in Lark's or llama.cpp's notation.",
        "",
        ('start: "a" | "b"', 'root ::= "a" | "b" root'),
    ),
    Row(
        "structured_outputs.json_object",
        {"title": "`true`", "const": True},
        "The text is any JSON object.",
        "",
        (True,),
    ),
    Row(
        "structured_outputs.whitespace_pattern",
        _STRING,
        "A regular expression: what may stand between the parts of JSON.",
        "up to 40 white spaces",
    ),
    Row("structured_outputs.disable_any_whitespace", _BOOLEAN, "True: nothing may.", "false"),
    Row(
        "guided_json",
        _JSON_SCHEMA,
        "The older name of `structured_outputs.json`.",
        "",
        ({"type": "boolean"},),
    ),
    Row("guided_regex", _STRING, "Of `structured_outputs.regex`.", "", ("[0-9]+",)),
    Row("guided_choice", _CHOICES, "Of `structured_outputs.choice`.", "", (["a", "b"],)),
    Row("guided_grammar", _STRING, "Of `structured_outputs.grammar`.", "", ('start: "yes" | "no"',)),
)

_SERVING = (
    Row(
        "prediction",
        {
            "type": "object",
            "properties": {"type": {"const": "content"}, "content": {"anyOf": [_STRING, _TEXT_PARTS]}},
            "required": ["type", "content"],
            "additionalProperties": False,
        },
        "What the text will probably be: drafts that need no draft model.",
        "",
        ({"type": "content", "content": "there was a little girl"},),
    ),
    Row(
        "priority",
        _integer(-MAX_PRIORITY, MAX_PRIORITY),
        "The lower, the sooner it is served where not all can be.",
        "0",
        (-3,),
    ),
    Row(
        "timeout",
        _number(LEAST_TIMEOUT, MOST_TIMEOUT),
        "Seconds after which the request ends with an error; or the header `x-request-timeout`.",
        "as the server says",
        (30.0,),
    ),
    Row(
        "store",
        _BOOLEAN,
        "False: the prompt is not recorded. True: only where the server records prompts (`--record-prompts`). Answers "
        "are never kept.",
        "true where prompts are recorded",
        (False,),
    ),
    Row("speculation", _OBJECT, "How drafting goes; the text is the same however it does, but for `rule`."),
    Row("speculation.enabled", _BOOLEAN, "False: plain decoding.", "as the server says", (True,)),
    Row("speculation.max_depth", _integer(1, MAX_DRAFT_DEPTH), "Longest path of drafts.", "as the server says", (2,)),
    Row(
        "speculation.sources",
        _SOURCES,
        "Who may draft.",
        "as the server says",
        (["lookup"],),
    ),
    Row(
        "speculation.remember",
        _BOOLEAN,
        "False: what is said is not kept to draft for later requests (of the same API key, unless the operator "
        "decided otherwise). Leave `suffix` out of `sources` to do without what is kept of earlier ones.",
        "as the server says",
        (False,),
    ),
    Row(
        "speculation.rule",
        _one_of(Rule),
        "What makes the target keep a draft. `coupled`: that it is what the seed gives. `rejection`: a coin; all texts "
        "are as likely as without drafts, but which one a seed gives depends on them, unless `temperature` is 0.",
        "as the server says",
        ("coupled",),
    ),
    Row("speculation.details", _BOOLEAN, "Tell of every step and proposal, and sum up at the end.", "false", (True,)),
    Row("speculation.schedule", _one_of(Schedule), "When drafts are made.", "as the server says", ("sequential",)),
)


def _label(name: str, schema: Schema, about: str, example: object) -> Row:
    return Row(name, schema, about, examples=(example,), support=Support.LABEL)


def _parsed(name: str, about: str) -> Row:
    """What OpenAI's client puts into a message that it has parsed, and sends back with it."""
    return Row(name, {"title": "any"}, about, where="chat", support=Support.LABEL)


_LABELS = (
    _label("user", _LABEL, "A label.", "somebody"),
    _label("safety_identifier", _LABEL, "A label.", "somebody"),
    _label(
        "metadata",
        {
            "type": "object",
            "maxProperties": MAX_METADATA,
            "propertyNames": {"maxLength": MAX_METADATA_KEY},
            "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
        },
        "Labels.",
        {"team": "a"},
    ),
    _label("prompt_cache_key", _LABEL, "A hint: prefixes are found by what they say.", "a"),
    _label(
        "prompt_cache_options",
        {
            "type": "object",
            "properties": {"mode": _one_of(CACHE_MODES), "ttl": _one_of(CACHE_TTLS)},
            "additionalProperties": False,
        },
        "A hint, likewise.",
        {"mode": "implicit"},
    ),
    _label("prompt_cache_retention", _one_of(CACHE_RETENTIONS), "A hint: they are kept while there is room.", "24h"),
    _label("service_tier", _one_of(SERVICE_TIERS), "There is one tier; see `priority`.", "auto"),
    Row(
        "structured_outputs.disable_fallback",
        _BOOLEAN,
        "There is one backend, and none to fall back on.",
        "false",
        support=Support.LABEL,
    ),
    _parsed("messages[].parsed", "What OpenAI's client read `content` as."),
    _parsed("messages[].tool_calls[].function.parsed_arguments", "What OpenAI's client read `arguments` as."),
)

SUPPORTED = (*_WHAT, *_DRAWING, *_ENDING, *_READING, *_FORM, *_ANSWER, *_SERVING, *_LABELS)
