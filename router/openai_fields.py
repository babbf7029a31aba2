"""Which request fields exist: those carried out, and those of OpenAI or vLLM that are refused for now.

A known field that is not supported is still accepted with a value that asks for nothing ("neutral"), because
client libraries send such values unasked. ``null`` is neutral for every field, as it is for OpenAI.
Everything else is refused: no parameter is silently ignored. ``user`` is the one field that is accepted and
has no effect: it is a label.
"""

from __future__ import annotations

from collections.abc import Mapping

_SUPPORTED = frozenset(
    {
        "model",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "stream",
        "stream_options",
        "n",
        "user",
        "priority",
        "speculation",
    }
)
COMPLETION_FIELDS = _SUPPORTED | {"prompt"}
"""Fields of ``/v1/completions`` that are carried out."""
CHAT_FIELDS = _SUPPORTED | {"messages"}
"""Fields of ``/v1/chat/completions`` that are carried out."""

Neutral = Mapping[str, tuple[object, ...]]
"""Known fields that are not supported, each with the values, besides null, that ask for nothing."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "min_tokens": (0,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": ([],),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "use_beam_search": (False,),
    "cache_salt": (),
    "request_id": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "prediction": (),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
}

COMPLETION_NEUTRAL: Neutral = _NEUTRAL | {
    "logprobs": (False,),
    "suffix": ("",),
    "add_special_tokens": (True,),
}
"""Refused fields of ``/v1/completions``."""

CHAT_NEUTRAL: Neutral = _NEUTRAL | {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
}
"""Refused fields of ``/v1/chat/completions``."""

MESSAGE_FIELDS = frozenset({"role", "content", "name"})
"""Fields of a chat message that are carried out."""
MESSAGE_NEUTRAL: Neutral = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning_content": ("",),
}
"""Refused fields of a chat message. OpenAI's client sends the empty ones back with an assistant's message."""
