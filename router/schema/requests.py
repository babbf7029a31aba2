"""From the bytes of a request body to a request that can run, or an error that names the field at fault.

Parse, don't validate: what comes out of :func:`request_of` needs no further checks. The fields are declared in
:mod:`router.schema.request_schema`; what depends on the model, the server or other fields is read here, and in modules
of their own: prompts, how tokens are drawn, and the form of the text. Knows nothing of HTTP.

Values mean what they mean to vLLM and OpenAI; what is out of bounds is refused, never clipped. Nothing of speculation
bears on the text, but for ``speculation.rule``, and that not on its law. With speculation off a prediction is checked
like any other and then of no use: so the same request can be sent with and without.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from router.errors import ApiError
from router.generation import Generation, ServedModel
from router.schema.fields import missing, nearest, show, wrong_value
from router.schema.prompts import (
    Prompt,
    chat_prompt,
    check_prompt_logprobs,
    check_sizes,
    completion_prompts,
    length_asked,
    max_characters,
    max_tokens_of,
    prediction_of,
    truncated,
)
from router.schema.request_objects import StreamOptions
from router.schema.request_schema import BODIES, Body, ChatBody, CompletionBody, Kind
from router.schema.sampling import sampling_of, stop_strings_of, stop_tokens_of, with_own_seed
from router.schema.structured import Tools, grammar_of, text_grammar, tools_of
from router.text.tokenizer import Tokenizer
from speculation import digest as digests
from speculation.messages import RequestOptions, Rule, Sampling, Source, SourceName, Speculation, Token

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
class AnswerForm:
    """What an answer shows."""

    logprobs: int | None = None
    """With each token its log-probability and those of so many of the likeliest; None: without any."""
    prompt_logprobs: int | None = None
    """The same of the prompt, in vLLM's form."""
    echo: bool = False
    """The answer begins with the prompt, with log-probabilities if there are any."""
    token_ids: bool = False
    """With the ids of the tokens of prompt and text."""
    names_as_ids: bool = False
    """Tokens are named ``token_id:5``."""
    special: bool = False
    """Special tokens show in the text."""
    stop_string: bool = False
    """The text ends after a stop string instead of before it."""

    @property
    def asked_of_prompt(self) -> dict[str, int]:
        """By field: with the log-probability of each token of the prompt those of so many of the likeliest."""
        wanted = {"prompt_logprobs": self.prompt_logprobs, "logprobs": self.logprobs if self.echo else None}
        return {name: count for name, count in wanted.items() if count is not None}

    @property
    def of_prompt(self) -> int | None:
        """Of how many tokens the target has to tell log-probabilities at each place of the prompt."""
        return max(self.asked_of_prompt.values(), default=None)


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
    stream_options: StreamOptions = _PLAIN_STREAM
    details: bool = False
    """Whether the answer tells how it was speculated, to the end."""
    form: AnswerForm = AnswerForm()
    tools: Tools = Tools()
    prompt_only: bool = False
    """Nothing is asked for but the prompt itself: what is generated is dropped."""
    continues: bool = True
    """The text goes on where the prompt ends, instead of beginning anew."""
    timeout: float | None = None
    """Seconds it may take, as it says itself; once it is let in, as it is allowed. None: as many as it takes."""
    store: bool = True
    """Whether its prompts may be kept, where that is done."""

    def within(self, scope: str, timeout: float | None = None, target_timeout: float | None = None) -> ApiRequest:
        """The same, for whom this scope stands, and who has so many seconds, so many of them to wait for a target."""
        generations = (
            replace(one, request_options=replace(one.request_options, scope=scope), timeout=target_timeout)
            for one in self.generations
        )
        return replace(self, generations=tuple(generations), timeout=timeout)


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
    check_sizes(body, max_characters(tokenizer, model))
    n = _choices(body, model_entry)
    tools = tools_of(body, tokenizer) if isinstance(body, ChatBody) else Tools()
    prompts = _prompts(body, n, model_entry, tools)
    options = _stream_options(body)
    form = answer_form_of(body)
    field, asked = length_asked(body, minimum=0 if form.echo else 1)
    prompts = truncated(body, prompts, model.context, max(asked, 1))
    limits = [max_tokens_of(body, len(prompt.tokens), model.context) for prompt in prompts]
    prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
    check_prompt_logprobs(form.asked_of_prompt, n * prompt_tokens)
    prompt_only = bool(field) and asked == 0
    sampling = sampling_of(body, model.vocabulary, tokenizer)
    speculation = speculation_of(body, model_entry.speculation, model.sources)
    details = body.speculation is not None and body.speculation.details
    first = Generation(
        prompt=(),
        sampling=sampling,
        max_tokens=0,
        min_tokens=_min_tokens(body, limits),
        stop_tokens=stop_tokens_of(body, model.vocabulary, tokenizer),
        speculation=speculation,
        request_id=request_id,
        priority=body.priority,
        model=model,
        request_options=RequestOptions(
            grammar=grammar_of(tools, text_grammar(body), tokenizer),
            prediction=_prediction(body, model_entry, sampling, speculation.rule),
            logprobs=form.logprobs,
            prompt_logprobs=form.of_prompt,
            cache_salt=body.cache_salt or "",
        ),
        details=details,
    )
    each = [
        replace(first, prompt=prompt.tokens, digest=digests.of(prompt.tokens), max_tokens=1 if prompt_only else limit)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    return ApiRequest(
        kind="chat" if isinstance(body, ChatBody) else "completion",
        model=model_entry.name,
        generations=tuple(
            replace(each[number // n], sampling=with_own_seed(sampling, number)) for number in range(n * len(each))
        ),
        stop=stop_strings_of(body),
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        n=n,
        stream=body.stream,
        stream_options=options,
        details=details,
        form=form,
        tools=tools,
        prompt_only=prompt_only,
        continues=not isinstance(body, ChatBody) or body.continue_final_message,
        timeout=body.timeout,
        store=_store(body, model_entry),
    )


def _prompts(body: Body, n: int, model_entry: ModelEntry, tools: Tools) -> tuple[Prompt, ...]:
    model, max_choices = model_entry.model, model_entry.max_choices
    if isinstance(body, ChatBody):
        return (chat_prompt(body, model_entry.tokenizer, model, tools),)
    assert isinstance(body, CompletionBody)
    prompts = completion_prompts(body, model_entry.tokenizer, model.vocabulary, max_choices)
    if len(prompts) * n > max_choices:
        raise wrong_value("n", f"at most {max_choices // len(prompts)} with {len(prompts)} prompts", n)
    return prompts


def _prediction(body: Body, model_entry: ModelEntry, sampling: Sampling, rule: Rule) -> tuple[Token, ...]:
    """What is drafted of ``prediction``: under the rejection rule nothing that may depend on the noise it is judged by.

    An answer of the same seed does, and then the text no longer has the target's law (Leviathan et al. 2023 ask for
    independence of draft and coin).
    """
    tokens = prediction_of(body, model_entry.tokenizer, model_entry.model)
    judged_by_known_noise = rule is Rule.REJECTION and body.seed is not None and not sampling.greedy
    return () if judged_by_known_noise else tokens


def _min_tokens(body: Body, limits: Sequence[int]) -> int:
    for limit in limits:
        if body.min_tokens > limit:
            raise wrong_value("min_tokens", f"an integer from 0 to {limit}", body.min_tokens)
    return body.min_tokens


def _store(body: Body, model_entry: ModelEntry) -> bool:
    """``store``. Nobody can have kept what no router keeps."""
    if body.store and not model_entry.records:
        raise wrong_value("store", "false or left out: this server does not record prompts", body.store)
    return model_entry.records if body.store is None else body.store


def _stream_options(body: Body) -> StreamOptions:
    options = body.stream_options or _PLAIN_STREAM
    if body.stream_options is not None and not body.stream:
        raise wrong_value("stream_options", "left out unless stream is true", options.model_dump(exclude_unset=True))
    if (asked := options.continuous_usage_stats) and not options.include_usage:
        raise wrong_value("stream_options.continuous_usage_stats", "left out, unless include_usage is true", asked)
    return options


def answer_form_of(body: Body) -> AnswerForm:
    """Raises :class:`ApiError`."""
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError("invalid_value", "prompt_logprobs cannot be streamed; set stream to false", "prompt_logprobs")
    return AnswerForm(
        logprobs=_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
        echo=isinstance(body, CompletionBody) and body.echo,
        token_ids=body.return_token_ids,
        names_as_ids=body.return_tokens_as_token_ids,
        special=not body.skip_special_tokens,
        stop_string=body.include_stop_str_in_output,
    )


def _logprobs(body: Body) -> int | None:
    if not isinstance(body, ChatBody):
        return body.logprobs if isinstance(body, CompletionBody) else None
    if body.top_logprobs and not body.logprobs:
        raise wrong_value("top_logprobs", "0 or left out, unless logprobs is true", body.top_logprobs)
    return body.top_logprobs if body.logprobs else None


def speculation_of(body: Body, default: Speculation, registered: Sequence[SourceName] = ()) -> Speculation:
    """The field over the server's default; ``registered``: draft sources besides the built-in ones. Raises ApiError."""
    if body.speculation is None:
        return default
    given = body.speculation.model_dump(exclude_none=True, exclude={"details"})
    if "sources" in given:
        names = (*Source, *registered)
        if any(source not in names for source in given["sources"]):
            raise wrong_value(
                "speculation.sources", f"a list of draft sources, among {', '.join(names)}", given["sources"]
            )
        given["sources"] = frozenset(given["sources"])
    return replace(default, **given)
