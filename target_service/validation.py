"""What a target can never serve, however often it is asked. Decides from the request alone."""

from __future__ import annotations

from itertools import chain

from speculation.messages import Open

MAX_PROMPT_LOGPROBS = 1 << 20
"""Most log-probabilities told of one prompt: they go out in one message."""


def reason_to_refuse(opened: Open, vocabulary: int, context: int, capacity: int) -> str | None:
    """Why a session cannot be served, one line; None if it can. Fields are called as in a request.

    ``vocabulary``: token ids are below; ``context``, ``capacity``: longest sequences of the model and of the cache.
    """
    sampling, request_options = opened.sampling, opened.request_options
    for what, tokens in (
        ("token", opened.tokens),
        ("logit_bias token", [token for token, _ in sampling.bias]),
        ("allowed_token_ids token", sampling.allowed),
        ("bad_words token", chain.from_iterable(sampling.banned)),
        ("prediction token", request_options.prediction),
    ):
        worst = max(tokens, default=0)
        if worst >= vocabulary:
            return f"{what} {worst} is outside the vocabulary of {vocabulary}"
    if opened.limits.end > context:
        return f"{opened.limits.end} tokens exceed the model's context of {context}"
    if opened.limits.end > capacity:
        return f"{opened.limits.end} tokens exceed the cache of {capacity}"
    prompt = len(opened.tokens) - len(opened.generated)
    if (
        request_options.prompt_logprobs is not None
        and prompt * (1 + request_options.prompt_logprobs) > MAX_PROMPT_LOGPROBS
    ):
        return (
            f"prompt_logprobs {request_options.prompt_logprobs} for {prompt} tokens exceed the {MAX_PROMPT_LOGPROBS} "
            "log-probabilities told of one prompt"
        )
    return None
