"""The request fields that say what an answer shows beside its text, and how, and the labels that change nothing."""

from __future__ import annotations

from dataclasses import dataclass

from router.errors import ApiError
from router.field_bounds import (
    CACHE_MODES,
    CACHE_RETENTIONS,
    CACHE_TTLS,
    MAX_LABEL,
    MAX_LOGPROBS,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    SERVICE_TIERS,
)
from router.field_row import Kind
from router.fields import Fields


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
    def of_prompt(self) -> int | None:
        """Of how many tokens the target has to tell log-probabilities at each place of the prompt."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)


def answer_form_of(fields: Fields, kind: Kind, *, stream: bool) -> AnswerForm:
    """Raises :class:`ApiError`."""
    prompt_logprobs = fields.integer("prompt_logprobs", None, low=0, high=MAX_LOGPROBS)
    if prompt_logprobs is not None and stream:
        raise ApiError("invalid_value", "prompt_logprobs cannot be streamed; set stream to false", "prompt_logprobs")
    return AnswerForm(
        logprobs=_chat_logprobs(fields) if kind == "chat" else _completion_logprobs(fields),
        prompt_logprobs=prompt_logprobs,
        echo=kind == "completion" and fields.boolean("echo"),
        token_ids=fields.boolean("return_token_ids"),
        names_as_ids=fields.boolean("return_tokens_as_token_ids"),
        special=not fields.boolean("skip_special_tokens", True),
        stop_string=fields.boolean("include_stop_str_in_output"),
    )


def _completion_logprobs(fields: Fields) -> int | None:
    if fields.get("logprobs") is False:  # what some clients of the chat endpoint send here too
        return None
    return fields.integer("logprobs", None, low=0, high=MAX_LOGPROBS)


def _chat_logprobs(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", 0, low=0, high=MAX_LOGPROBS)
    if fields.boolean("logprobs"):
        return top
    if top:
        raise fields.wrong_value("top_logprobs", "0 or left out, unless logprobs is true")
    return None


def check_labels(fields: Fields) -> None:
    """Fields that have no effect are of the right type all the same. Raises :class:`ApiError`."""
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        if len(fields.string(name, "")) > MAX_LABEL:
            raise fields.wrong_value(name, f"at most {MAX_LABEL} characters")
    fields.choice("service_tier", SERVICE_TIERS[0], SERVICE_TIERS)
    fields.choice("prompt_cache_retention", CACHE_RETENTIONS[0], CACHE_RETENTIONS)
    cache = fields.nested("prompt_cache_options")
    cache.refuse_others(frozenset({"mode", "ttl"}))
    cache.choice("mode", CACHE_MODES[0], CACHE_MODES)
    cache.choice("ttl", CACHE_TTLS[0], CACHE_TTLS)
    metadata = fields.nested("metadata")
    expected = f"at most {MAX_METADATA} keys of {MAX_METADATA_KEY} characters with strings of {MAX_METADATA_VALUE}"
    if len(metadata.raw) > MAX_METADATA:
        raise fields.wrong_value("metadata", expected)
    for key, value in metadata.raw.items():
        if not isinstance(value, str):
            raise fields.wrong_type("metadata", expected)
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise fields.wrong_value("metadata", expected)
