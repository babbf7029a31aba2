"""The request fields that say what an answer shows beside its text, and how."""

from __future__ import annotations

from dataclasses import dataclass

from router.errors import ApiError
from router.schema.fields import wrong_value
from router.schema.request_schema import Body, ChatBody, CompletionBody


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
    if isinstance(body, CompletionBody):
        return body.logprobs
    if not isinstance(body, ChatBody) or body.logprobs:
        return body.top_logprobs if isinstance(body, ChatBody) else None
    if body.top_logprobs:
        raise wrong_value("top_logprobs", "0 or left out, unless logprobs is true", body.top_logprobs)
    return None
