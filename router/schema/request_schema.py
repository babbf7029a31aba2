"""The bodies of requests: every field, what it takes and does, or why it is refused.

Everything that speaks of fields reads these models: parsing, the OpenAPI description (:mod:`router.http.openapi`),
``docs/api.md`` (:mod:`tests.api_page`), and the tests that send every field. Here stands what can be said of a
field by itself; what depends on the model, the server or other fields is checked where the field is used. Fields that
are not declared are refused: no parameter is silently ignored. What is said to have no effect is a label.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from router.schema import request_objects as objects
from router.schema.fields import Array, Fields, RefusedField, StringOr, at_most
from speculation.messages import MAX_PRIORITY

Kind = Literal["completion", "chat"]

COMPLETION_MAX_TOKENS = 16
"""Default of ``max_tokens`` for completions, as in OpenAI's API. Chat takes the rest of the context."""
MIN_TEMPERATURE = 1e-6
"""Below this logits divided by it overflow; 0 itself means greedy."""
MAX_SEED = 2**64 - 1
MAX_MESSAGES = 2048
"""As in OpenAI's API."""
MIN_TIMEOUT, MAX_TIMEOUT = 0.001, 86400.0
"""Seconds that a request may ask for."""


def _not_tiny(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise PydanticCustomError("invalid_value", f"0 (greedy) or at least {MIN_TEMPERATURE:g}")
    return value


Phrase = Annotated[str, Field(min_length=1, max_length=256)]
Label = Annotated[str, Field(max_length=512)]
Key = Annotated[str, Field(max_length=64)]
_LABELS = "an object of at most 16 keys of 64 characters with strings of 512"
Token = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Logprobs = Annotated[int, Field(ge=0, le=20)]
Phrases = Annotated[Array[Phrase], Field(max_length=16)]
_TOKENS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXT = {"type": "string", "minLength": 1}
_SEVERAL = {"type": "array", "minItems": 1, "items": {"anyOf": [_TEXT, _TOKENS]}}
Prompt = Annotated[StringOr[str, list[Any]], WithJsonSchema({"anyOf": [_TEXT, _TOKENS, _SEVERAL]})]


class Body(Fields):
    """The fields of both endpoints."""

    model: str | None = None
    """Which of the served models. Default: the only one, where there is one"""
    n: int = Field(1, json_schema_extra={"minimum": 1}, examples=[2])
    """How many texts; at most as many as the server allows."""
    best_of: int | None = Field(None, ge=1, examples=[1])
    """Only what `n` is: more texts than are returned are not written. Default: n"""

    temperature: Annotated[float, AfterValidator(_not_tiny)] = Field(1.0, ge=0, le=100, examples=[0, 0.7])
    """0: the likeliest token, always."""
    top_p: float = Field(1.0, gt=0, le=1, examples=[0.9])
    """Nucleus: the likeliest tokens that have this much probability."""
    top_k: int = Field(0, ge=-1, le=2**31 - 1, examples=[20])
    """Only so many of the likeliest tokens; 0 or -1: all."""
    min_p: float = Field(0.0, ge=0, le=1, examples=[0.05])
    """Only tokens with this share of the likeliest one's probability."""
    seed: int | None = Field(None, ge=-(2**63), le=MAX_SEED, examples=[7])
    """The same seed, the same text; see `speculation.rule`. Default: a new one"""
    presence_penalty: Penalty = Field(0.0, examples=[1.5])
    """Taken off the logit of every token generated before."""
    frequency_penalty: Penalty = Field(0.0, examples=[0.8])
    """Taken off it for each time it was generated."""
    repetition_penalty: float = Field(1.0, ge=1e-4, le=100, examples=[1.3])
    """Divides positive logits of tokens in prompt or text, multiplies negative ones."""
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024), at_most(1024)] = Field(
        {}, examples=[{"5": 4.5, "9": -100}]
    )
    """Token ids, as strings, and what is added to their logits."""
    allowed_token_ids: Array[Token] | None = Field(
        None,
        min_length=1,
        max_length=16_384,
        title="an array of at most 16384 token ids, or left out: with none no token could be drawn",
        examples=[[5, 6, 7, 8, 9, 10]],
    )
    """No other token is drawn. Default: all"""
    bad_words: Array[Phrase] = Field([], max_length=128, examples=[["the", "once"]])
    """Never written, neither as a text begins with them nor after a space."""

    max_tokens: int | None = Field(None, ge=0, examples=[12])
    """How many tokens at most; within the model's context. 0 only with `echo`. Default: 16; chat: all that fit"""
    max_completion_tokens: int | None = Field(None, ge=0, examples=[12])
    """The newer name of `max_tokens`; one of them. 0 only with `echo`."""
    min_tokens: int = Field(0, ge=0, examples=[4])
    """No stop token or stop string counts before; at most `max_tokens`."""
    stop: StringOr[Phrase, Phrases] = Field([], examples=["e", ["\n", "it"]])
    """The text ends before the first of these."""
    stop_token_ids: Array[Token] = Field([], max_length=64, examples=[[9, 10]])
    """Tokens that end the text."""
    ignore_eos: bool = Field(False, examples=[True])
    """The model's own stop tokens do not end the text."""
    include_stop_str_in_output: bool = Field(False, examples=[True])
    """The text ends after the stop string."""

    add_special_tokens: bool | None = Field(None, examples=[False, True])
    """Put around text what the tokenizer puts there, such as a first token.
    Default: true; chat: false, templates write it"""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, examples=[3, -1])
    """Only so many of the last tokens of the prompt; -1: as many as fit. Not 0. Default: all"""

    response_format: objects.ResponseFormat | None = Field(
        None,
        examples=[
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}},
        ],
    )
    """`text`, `json_object`, or `json_schema` with `json_schema.schema`. Only one of this, `structured_outputs` and
    `guided_*`. Where `tools` are offered, the model may write calls instead. Default: text"""
    structured_outputs: objects.StructuredOutputs | None = Field(
        None, examples=[{"regex": "[a-z]+"}, {"choice": ["yes", "no"]}, {"json": {"type": "integer"}}]
    )
    """Exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`, and how JSON is laid out."""
    guided_json: objects.JsonSchema = Field(None, examples=[{"type": "boolean"}])
    """The older name of `structured_outputs.json`."""
    guided_regex: str | None = Field(None, examples=["[0-9]+"])
    """Of `structured_outputs.regex`."""
    guided_choice: objects.Choices | None = Field(None, examples=[["a", "b"]])
    """Of `structured_outputs.choice`."""
    guided_grammar: str | None = Field(None, examples=['start: "yes" | "no"'])
    """Of `structured_outputs.grammar`."""

    stream: bool = Field(False, examples=[True])
    """Send the text as it is decided, in server-sent events."""
    stream_options: objects.StreamOptions | None = None
    """Only with `stream`."""
    prompt_logprobs: Logprobs | None = Field(None, examples=[2])
    """The same for the prompt, in vLLM's form; not with `stream`. The prompt is then computed without the cache.
    Default: none"""
    return_token_ids: bool = Field(False, examples=[True])
    """Token ids of prompt and text, as vLLM gives them."""
    return_tokens_as_token_ids: bool = Field(False, examples=[True])
    """Tokens in log-probabilities are written `token_id:5`."""
    skip_special_tokens: bool = Field(True, examples=[False])
    """False: special tokens show in the text."""

    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(None, examples=["tenant 7"])
    """Only requests with the same salt, and of the same API key where there are keys, find what was computed of this
    prompt and its text. It never changes a text."""
    prediction: objects.Prediction | None = Field(
        None, examples=[{"type": "content", "content": "there was a little girl"}]
    )
    """What the text will probably be: drafts that need no draft model. Under the rejection rule it is of no use where
    `seed` is given, unless `temperature` is 0: an answer of the same seed would bias the text."""
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, examples=[-3])
    """The lower, the sooner it is served where not all can be."""
    timeout: float | None = Field(None, ge=MIN_TIMEOUT, le=MAX_TIMEOUT, examples=[30.0])
    """Seconds after which the request ends with an error; or the header `x-request-timeout`.
    Default: as the server says"""
    store: bool | None = Field(None, examples=[False])
    """False: the prompt is not recorded. True: only where the server records prompts (`--record-prompts`). Answers are
    never kept. Default: true where prompts are recorded"""
    speculation: objects.Steering | None = None
    """How drafting goes; the text is the same however it does, but for `rule`."""

    user: Label | None = Field(None, examples=["somebody"])
    """No effect. A label."""
    safety_identifier: Label | None = Field(None, examples=["somebody"])
    """No effect. A label."""
    metadata: Annotated[dict[Key, Label], Field(max_length=16), at_most(16)] = Field(
        {}, title=_LABELS, examples=[{"team": "a"}]
    )
    """No effect. Labels."""
    prompt_cache_key: Label | None = Field(None, examples=["a"])
    """No effect. A hint: prefixes are found by what they say."""
    prompt_cache_options: objects.CacheOptions | None = Field(None, examples=[{"mode": "implicit"}])
    """No effect. A hint, likewise."""
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = Field(None, examples=["24h"])
    """No effect. A hint: they are kept while there is room."""
    service_tier: Literal["auto", "default"] | None = Field(None, examples=["auto"])
    """No effect. There is one tier; see `priority`."""

    refused: ClassVar[Mapping[str, RefusedField]] = {
        "length_penalty": RefusedField("it belongs to beam search", (1,)),
        "use_beam_search": RefusedField("tokens are drawn, or the likeliest taken; use n for several texts", (False,)),
        "logits_processors": RefusedField("callers' code is not run; use logit_bias, bad_words or a grammar", ([],)),
        "spaces_between_special_tokens": RefusedField("decoding follows the model's tokenizer", (True,)),
        "request_id": RefusedField("send it as the header X-Request-Id"),
        "kv_transfer_params": RefusedField("caches do not move between workers"),
        "vllm_xargs": RefusedField("there are no arguments for plugins", ({},)),
        "mm_processor_kwargs": RefusedField(objects.TEXT_ONLY, ({},)),
    }


class CompletionBody(Body):
    """Of ``POST /v1/completions``."""

    prompt: Prompt = Field(
        title="a string, an array of token ids, or an array of either",
        examples=["Once upon a time", [5, 6, 7], ["One", "Two"], [[5, 6], [7]]],
    )
    """What to continue; together with `n` at most as many texts as the server allows."""
    logprobs: Annotated[Logprobs | None, BeforeValidator(lambda value: None if value is False else value)] = Field(
        None, examples=[0, 3]
    )
    """Log-probabilities of the text's tokens, and of so many of the likeliest at each place. They are the model's own:
    before penalties, biases, temperature and filters. Default: none"""
    echo: bool = Field(False, examples=[True])
    """The answer begins with the prompt; `logprobs` too."""

    refused: ClassVar[Mapping[str, RefusedField]] = {
        **Body.refused,
        "suffix": RefusedField("write the model's own fill-in-the-middle tokens into the prompt", ("",)),
        "prompt_embeds": RefusedField("only token ids cross the wire; give prompt as text or token ids"),
    }


class ChatBody(Body):
    """Of ``POST /v1/chat/completions``."""

    messages: Array[objects.Message] = Field(min_length=1, title="an array of at least one message")
    """The conversation, put into the model's chat template."""
    max_completion_tokens: int | None = Field(None, ge=1, examples=[12])
    """The newer name of `max_tokens`; one of them."""
    logprobs: bool = Field(False, examples=[True])
    """Log-probabilities of the text's tokens."""
    top_logprobs: Logprobs = 0
    """And of so many of the likeliest at each place; needs `logprobs`."""
    add_generation_prompt: bool | None = Field(None, examples=[False])
    """End the prompt where an assistant begins. Default: true"""
    continue_final_message: bool = False
    """Go on with the last message instead of a new one; needs `add_generation_prompt` false."""
    chat_template_kwargs: objects.JsonObject = Field({})
    """Values of variables that the model's chat template has."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, examples=["none"]
    )
    """For templates that have such a variable."""
    tools: Array[objects.Tool] = Field([], max_length=128)
    """Functions the model may call, where its chat template has a place for them and shows a form of calls that is
    known here (Hermes and Qwen, Llama 3)."""
    tool_choice: objects.ToolChoice | None = Field(None, examples=["none", "auto"])
    """`none`: tools are left out of the prompt, unless messages hold calls and a model has a template of its own for
    them. `required` or a name: the text is held to the form of a call, without idle whitespace. Default: auto"""
    parallel_tool_calls: bool = Field(True, examples=[True, False])
    """False: the answer ends with its first call."""

    refused: ClassVar[Mapping[str, RefusedField]] = {
        **Body.refused,
        "echo": RefusedField("the template's text is not part of an answer; use /v1/completions", (False,)),
        "media_io_kwargs": RefusedField(objects.TEXT_ONLY, ({},)),
        "functions": RefusedField(objects.INSTEAD_TOOLS, ([],)),
        "function_call": RefusedField(objects.INSTEAD_TOOLS, ("none", "auto")),
        "modalities": RefusedField(objects.TEXT_ONLY, (["text"],)),
        "audio": RefusedField(objects.TEXT_ONLY),
        "moderation": RefusedField("nothing is moderated"),
        "verbosity": RefusedField("say it in a message", ("medium",)),
        "web_search_options": RefusedField("the server reads no web pages; offer a tool"),
        "documents": RefusedField("write them into a message", ([],)),
        "include_reasoning": RefusedField("reasoning is part of the text", (True,)),
        "chat_template": RefusedField(
            "a template is a program, and whoever runs the server chooses it; render it yourself for /v1/completions"
        ),
    }


BODIES: dict[Kind, type[Body]] = {"completion": CompletionBody, "chat": ChatBody}
