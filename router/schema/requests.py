"""From the bytes of a request body to a request that can run, or an error that names the field at fault.

Parse, don't validate: what comes out of :func:`parse_completion` and :func:`parse_chat` needs no further
checks. The fields are declared in :mod:`router.schema.request_schema`; what depends on the model, the server or other
fields is read in modules of their own, by what they are about. Knows nothing of HTTP.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import NoReturn

from router.errors import ApiError
from router.generation import Generation, ServedModel
from router.schema import answer_fields
from router.schema.answer_fields import AnswerForm
from router.schema.fields import missing, nearest, show, wrong_value
from router.schema.prompts import Prompt, chat_prompt, check_sizes, completion_prompts, truncated
from router.schema.request_objects import StreamOptions
from router.schema.request_schema import BODIES, Body, ChatBody, CompletionBody, Kind
from router.schema.structured import text_grammar
from router.schema.tools import Tools, grammar_of, tools_of
from router.text.tokenizer import Tokenizer
from speculation.messages import RequestOptions, Speculation

MAX_MODEL_CHARACTERS = 256
MAX_MODELS_NAMED = 16
_PLAIN_STREAM = StreamOptions.read({})


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """What requests are checked against: the served model, its public name, and the bounds of this server."""

    name: str
    model: ServedModel
    tokenizer: Tokenizer
    max_choices: int
    speculation: Speculation = Speculation()
    """What a request gets that does not say otherwise."""
    records: bool = False
    """Whether prompts are kept; see :mod:`router.http.prompt_recorder`."""


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A request that can run: one generation per choice, in the order of the answer's choices."""

    kind: Kind
    model: str
    generations: tuple[Generation, ...]
    stop: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    """Each is continued by ``n`` generations."""
    prompt_tokens: int
    """Of all prompts; a prompt that is continued several times counts once."""
    n: int = 1
    """Choices of each prompt."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """In every chunk."""
    include_speculation: bool = False
    details: bool = False
    """Whether the answer tells how it was speculated, to the end."""
    form: AnswerForm = AnswerForm()
    tools: Tools = Tools()
    prompt_only: bool = False
    """Nothing is asked for but the prompt itself: what is generated is dropped."""
    continues: bool = True
    """The text goes on where the prompt ends, instead of beginning anew."""
    timeout: float | None = None
    """Seconds it may take, as it says itself."""
    store: bool = True
    """Whether its prompts may be kept, where that is done."""

    def within(self, scope: str, timeout: float | None = None) -> ApiRequest:
        """The same, for whom this scope stands, and who waits so many seconds for a target."""
        generations = (
            replace(one, request_options=replace(one.request_options, scope=scope), timeout=timeout)
            for one in self.generations
        )
        return replace(self, generations=tuple(generations))


def parse_object(body: bytes) -> dict[str, object]:
    """A JSON object in UTF-8, without Python's extensions NaN and Infinity. Raises :class:`ApiError`."""
    try:
        text = body.removeprefix(BOM_UTF8).decode()
        raw = json.loads(text, parse_constant=_no_constant)
        if "\\ud" in text or "\\uD" in text:  # Half of a surrogate pair is valid JSON, but no text.
            json.dumps(raw, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ApiError("invalid_json", f"the body is not UTF-8: byte {error.start} is not valid") from None
    except UnicodeEncodeError:
        raise ApiError("invalid_json", "the body has half of a surrogate pair (\\ud800 to \\udfff)") from None
    except RecursionError:
        raise ApiError("invalid_json", "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError("invalid_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ApiError("invalid_json", f"the body must be a JSON object, got {show(raw)}")
    return raw


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def read_body(body: bytes, kind: Kind) -> Body:
    """What can be checked without knowing the model. Raises :class:`ApiError`."""
    return BODIES[kind].read(parse_object(body))


def _choices(body: Body, model_entry: ModelEntry) -> int:
    """``n``. ``best_of`` would have more texts written than returned, by the likeliest; here all are returned."""
    n = body.n
    if not 1 <= n <= model_entry.max_choices:
        raise wrong_value("n", f"an integer from 1 to {model_entry.max_choices}", n)
    if body.best_of not in (None, n):
        expected = f"left out or what n is ({n}): no more texts are written than returned"
        raise wrong_value("best_of", expected, body.best_of)
    return n


def model_asked(body: Body, served: Collection[str]) -> str:
    """Which of the models a request is for; it need not say so where there is only one. Raises :class:`ApiError`."""
    name = next(iter(served)) if body.model is None and len(served) == 1 else body.model
    if name is None:
        raise missing("model", f"one of {known_models(served)}")
    if name not in served:
        raise no_such_model(name, served)
    return name


def no_such_model(name: str, models: Iterable[str]) -> ApiError:
    """The refusal of a model that is not served; it names those that are."""
    served = list(models)
    hint = nearest(name, served) if len(served) > MAX_MODELS_NAMED else ""  # else it stands among those named
    message = f"there is no model {show(name[:MAX_MODEL_CHARACTERS])}{hint}; this server has {known_models(served)}"
    return ApiError("model_not_found", message, "model")


def known_models(models: Iterable[str]) -> str:
    """Their names, for messages."""
    names = [repr(name) for name in models]
    more = f" and {len(names) - MAX_MODELS_NAMED} more" if len(names) > MAX_MODELS_NAMED else ""
    return ", ".join(names[:MAX_MODELS_NAMED]) + more


def request_of(body: Body, model_entry: ModelEntry, request_id: str) -> ApiRequest:
    """A request for the model that it asks for. Raises :class:`ApiError`."""
    tokenizer, model = model_entry.tokenizer, model_entry.model
    check_sizes(body, model.context * tokenizer.longest)
    n = _choices(body, model_entry)
    tools = tools_of(body, tokenizer) if isinstance(body, ChatBody) else Tools()
    prompts = _prompts(body, n, model_entry, tools)
    options = _stream_options(body)
    form = answer_fields.answer_form_of(body)
    field, asked = answer_fields.length_asked(body, minimum=0 if form.echo else 1)
    prompts = truncated(body, prompts, model.context, max(asked, 1))
    limits = [answer_fields.max_tokens_of(body, len(prompt.tokens), model.context) for prompt in prompts]
    prompt_only = bool(field) and asked == 0
    sampling = answer_fields.sampling_of(body, model.vocabulary, tokenizer)
    details = answer_fields.wants_details(body)
    first = Generation(
        prompt=(),
        sampling=sampling,
        max_tokens=0,
        stop_tokens=answer_fields.stop_tokens_of(body, model.vocabulary, tokenizer),
        speculation=answer_fields.speculation_of(body, model_entry.speculation, model.sources),
        request_id=request_id,
        priority=body.priority,
        model=model,
        request_options=RequestOptions(
            grammar=grammar_of(tools, text_grammar(body), tokenizer),
            prediction=answer_fields.prediction_of(body, tokenizer, model),
            logprobs=form.logprobs,
            prompt_logprobs=form.of_prompt,
            cache_salt=body.cache_salt or "",
        ),
        details=details,
    )
    return ApiRequest(
        kind="chat" if isinstance(body, ChatBody) else "completion",
        model=model_entry.name,
        generations=tuple(
            replace(
                first,
                prompt=prompt.tokens,
                sampling=answer_fields.with_own_seed(sampling, number * n + choice),
                max_tokens=1 if prompt_only else limit,
                min_tokens=answer_fields.min_tokens_of(body, limit),
            )
            for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
            for choice in range(n)
        ),
        stop=tuple(dict.fromkeys([body.stop] if isinstance(body.stop, str) else body.stop)),
        prompts=prompts,
        prompt_tokens=sum(len(prompt.tokens) for prompt in prompts),
        n=n,
        stream=body.stream,
        include_usage=options.include_usage,
        continuous_usage=options.include_usage and options.continuous_usage_stats,
        include_speculation=options.include_speculation,
        details=details,
        form=form,
        tools=tools,
        prompt_only=prompt_only,
        continues=not isinstance(body, ChatBody) or body.continue_final_message,
        timeout=body.timeout,
        store=_store(body, model_entry),
    )


def _prompts(body: Body, n: int, model_entry: ModelEntry, tools: Tools) -> tuple[Prompt, ...]:
    vocabulary, max_choices = model_entry.model.vocabulary, model_entry.max_choices
    if isinstance(body, ChatBody):
        return (chat_prompt(body, model_entry.tokenizer, vocabulary, tools),)
    assert isinstance(body, CompletionBody)
    prompts = completion_prompts(body, model_entry.tokenizer, vocabulary, max_choices)
    if len(prompts) * n > max_choices:
        raise wrong_value("n", f"at most {max_choices // len(prompts)} with {len(prompts)} prompts", n)
    return prompts


def _store(body: Body, model_entry: ModelEntry) -> bool:
    """``store``. Nobody can have kept what no router keeps."""
    if body.store and not model_entry.records:
        raise wrong_value("store", "false or left out: this server does not record prompts", body.store)
    return model_entry.records if body.store is None else body.store


def _stream_options(body: Body) -> StreamOptions:
    """``stream_options``, which only a stream has."""
    if body.stream_options is None:
        return _PLAIN_STREAM
    if not body.stream:
        given = body.stream_options.model_dump(exclude_unset=True)
        raise wrong_value("stream_options", "left out unless stream is true", given)
    return body.stream_options
