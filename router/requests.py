"""From the bytes of a request body to a request that can run, or an error that names the field at fault.

Parse, don't validate: what comes out of :func:`parse_completion` and :func:`parse_chat` needs no further
checks. The fields are read in modules of their own, by what they are about; their names stand in
:mod:`router.field_table`. Knows nothing of HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from router.answer_fields import AnswerForm, answer_form_of, check_labels
from router.bounds import check_sizes
from router.ending_fields import length_of, min_tokens_of, stop_strings_of, stop_tokens_of
from router.errors import ApiError
from router.field_bounds import LEAST_TIMEOUT, MOST_TIMEOUT
from router.field_row import Kind
from router.field_table import known, refusals
from router.fields import Fields, nearest, show
from router.generation import Generation, ServedModel
from router.prompts import Prompt, chat_prompt, completion_prompts, truncated
from router.sampling_fields import sampling_of, with_own_seed
from router.speculation_fields import prediction_of, speculation_of, wants_details
from router.structured import text_grammar
from router.tokenizer import Tokenizer
from router.tool_fields import Tools, tools_of
from router.tool_grammar import grammar_of
from speculation.messages import MAX_PRIORITY, Extras, Speculation

MAX_MODEL_CHARACTERS = 256
MAX_MODELS_NAMED = 16


@dataclass(frozen=True, slots=True)
class Offer:
    """What requests are checked against: the served model, its public name, and the bounds of this server."""

    name: str
    model: ServedModel
    tokenizer: Tokenizer
    max_choices: int
    speculation: Speculation = Speculation()
    """What a request gets that does not say otherwise."""
    records: bool = False
    """Whether prompts are kept; see :mod:`router.prompt_recorder`."""


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

    def within(self, scope: str) -> ApiRequest:
        """The same, for whom this scope stands."""
        generations = (replace(one, extras=replace(one.extras, scope=scope)) for one in self.generations)
        return replace(self, generations=tuple(generations))


def request_of(kind: Kind, fields: Fields, offer: Offer, request_id: str) -> ApiRequest:
    """A request of one of the two kinds, for the model that it asks for. Raises :class:`ApiError`."""
    check_sizes(fields, offer.model.context * offer.tokenizer.longest)
    n = _choices(fields, offer)
    if kind == "chat":
        tools = tools_of(fields, offer.tokenizer)
        prompts: Sequence[Prompt] = (chat_prompt(fields, offer.tokenizer, offer.model.vocabulary, tools),)
        return _request("chat", fields, prompts, n, offer, request_id, tools)
    prompts = completion_prompts(fields, offer.tokenizer, offer.model.vocabulary, offer.max_choices)
    if len(prompts) * n > offer.max_choices:
        raise fields.wrong_value("n", f"at most {offer.max_choices // len(prompts)} with {len(prompts)} prompts")
    return _request("completion", fields, prompts, n, offer, request_id)


def parse_object(body: bytes) -> dict[str, object]:
    """A JSON object in UTF-8, without Python's extensions NaN and Infinity. Raises :class:`ApiError`."""
    try:
        text = body.decode("utf-8-sig")
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


def read_fields(body: bytes, kind: Kind) -> Fields:
    """The fields of a body, none of which is unknown. Raises :class:`ApiError`."""
    fields = Fields(parse_object(body))
    fields.refuse_others(known(kind), refusals(kind))
    check_labels(fields)
    return fields


def _choices(fields: Fields, offer: Offer) -> int:
    """``n``. ``best_of`` would have more texts written than returned, by the likeliest; here all are returned."""
    n = fields.integer("n", 1, low=1, high=offer.max_choices)
    if fields.integer("best_of", n, low=1) != n:
        raise fields.wrong_value("best_of", f"left out or what n is ({n}): no more texts are written than returned")
    return n


def model_asked(fields: Fields, served: Collection[str]) -> str:
    """Which of the models a request is for; it need not say so where there is only one. Raises :class:`ApiError`."""
    only = next(iter(served)) if len(served) == 1 else None
    name = fields.string("model", only)
    if name is None:
        raise fields.missing("model", f"one of {known_models(served)}")
    if name not in served:
        raise no_such_model(name, served)
    return name


def no_such_model(name: str, offers: Iterable[str]) -> ApiError:
    """The refusal of a model that is not served; it names those that are."""
    served = list(offers)
    hint = nearest(name, served) if len(served) > MAX_MODELS_NAMED else ""  # else it stands among those named
    message = f"there is no model {show(name[:MAX_MODEL_CHARACTERS])}{hint}; this server has {known_models(served)}"
    return ApiError("model_not_found", message, "model")


def known_models(offers: Iterable[str]) -> str:
    """Their names, for messages."""
    names = [repr(name) for name in offers]
    more = f" and {len(names) - MAX_MODELS_NAMED} more" if len(names) > MAX_MODELS_NAMED else ""
    return ", ".join(names[:MAX_MODELS_NAMED]) + more


def _request(
    kind: Kind,
    fields: Fields,
    prompts: Sequence[Prompt],
    n: int,
    offer: Offer,
    request_id: str,
    tools: Tools = Tools(),
) -> ApiRequest:
    vocabulary, context = offer.model.vocabulary, offer.model.context
    stream, options = _streaming(fields, kind)
    include_usage = options.boolean("include_usage")
    form = answer_form_of(fields, kind, stream=stream)
    length = length_of(fields, kind, least=0 if form.echo else 1)
    prompts = truncated(fields, prompts, context, max(length.asked, 1))
    limits = [length.within(len(prompt.tokens), context) for prompt in prompts]
    prompt_only = length.field is not None and length.asked == 0
    sampling = sampling_of(fields, vocabulary, offer.tokenizer)
    stop_tokens = stop_tokens_of(fields, vocabulary, offer.tokenizer)
    speculation = speculation_of(fields, offer.speculation, offer.model.sources)
    extras = Extras(
        grammar=grammar_of(tools, text_grammar(fields), offer.tokenizer),
        prediction=prediction_of(fields, offer.tokenizer, offer.model),
        logprobs=form.logprobs,
        prompt_logprobs=form.of_prompt,
    )
    details = wants_details(fields)
    priority = fields.integer("priority", 0, low=-MAX_PRIORITY, high=MAX_PRIORITY)
    return ApiRequest(
        kind=kind,
        model=offer.name,
        generations=tuple(
            Generation(
                prompt=prompts[choice // n].tokens,
                sampling=with_own_seed(sampling, choice),
                max_tokens=1 if prompt_only else limits[choice // n],
                stop_tokens=stop_tokens,
                min_tokens=min_tokens_of(fields, limits[choice // n]),
                extras=extras,
                speculation=speculation,
                request_id=request_id,
                priority=priority,
                model=offer.model,
                details=details,
            )
            for choice in range(len(prompts) * n)
        ),
        stop=stop_strings_of(fields),
        prompts=tuple(prompts),
        prompt_tokens=sum(len(prompt.tokens) for prompt in prompts),
        n=n,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and options.boolean("continuous_usage_stats"),
        include_speculation=options.boolean("include_speculation"),
        details=details,
        form=form,
        tools=tools,
        prompt_only=prompt_only,
        continues=kind == "completion" or fields.boolean("continue_final_message"),
        timeout=fields.number("timeout", 0.0, low=LEAST_TIMEOUT, high=MOST_TIMEOUT) or None,
        store=_store(fields, offer),
    )


def _store(fields: Fields, offer: Offer) -> bool:
    """``store``. Nobody can have kept what no router keeps."""
    store = fields.boolean("store", offer.records)
    if store and not offer.records:
        raise fields.wrong_value("store", "false or left out: this server does not record prompts")
    return store


def _streaming(fields: Fields, kind: Kind) -> tuple[bool, Fields]:
    """``stream`` and ``stream_options``."""
    stream = fields.boolean("stream")
    options = fields.nested("stream_options")
    if not stream and fields.get("stream_options") is not None:
        raise fields.wrong_value("stream_options", "left out unless stream is true")
    options.refuse_others(known(kind, "stream_options"), refusals(kind, "stream_options"))
    return stream, options
