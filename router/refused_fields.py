"""The refused rows of :mod:`router.field_table`: fields of OpenAI or vLLM, and why they are not carried out."""

from __future__ import annotations

from router.field_row import refused

_TOOLS = "use tools and tool_choice"
_IMAGES = "models here read and write text only"

REFUSED = (
    refused("length_penalty", "it belongs to beam search", (1,)),
    refused("use_beam_search", "tokens are drawn, or the likeliest taken; use n for several texts", (False,)),
    refused("suffix", "write the model's own fill-in-the-middle tokens into the prompt", ("",), "completion"),
    refused("prompt_embeds", "only token ids cross the wire; give prompt as text or token ids", (), "completion"),
    refused("echo", "the template's text is not part of an answer; use /v1/completions", (False,), "chat"),
    refused("logits_processors", "callers' code is not run; use logit_bias, bad_words or a grammar", ([],)),
    refused("spaces_between_special_tokens", "decoding follows the model's tokenizer", (True,)),
    refused("cache_salt", "prefix caches are shared by all callers of a server; run one for each group"),
    refused("request_id", "send it as the header X-Request-Id"),
    refused("kv_transfer_params", "caches do not move between workers"),
    refused("vllm_xargs", "there are no arguments for plugins", ({},)),
    refused("mm_processor_kwargs", _IMAGES, ({},)),
    refused("media_io_kwargs", _IMAGES, ({},), "chat"),
    refused("functions", _TOOLS, ([],), "chat"),
    refused("function_call", _TOOLS, ("none", "auto"), "chat"),
    refused("modalities", _IMAGES, (["text"],), "chat"),
    refused("audio", _IMAGES, (), "chat"),
    refused("moderation", "nothing is moderated", (), "chat"),
    refused("verbosity", "say it in a message", ("medium",), "chat"),
    refused("web_search_options", "the server reads no web pages; offer a tool", (), "chat"),
    refused("documents", "write them into a message", ([],), "chat"),
    refused("include_reasoning", "reasoning is part of the text", (True,), "chat"),
    refused(
        "chat_template",
        "a template is a program, and whoever runs the server chooses it; render it yourself for /v1/completions",
        (),
        "chat",
    ),
    refused("structured_outputs.structural_tag", "use grammar"),
    refused("structured_outputs.disable_additional_properties", "write additionalProperties into the schema", (False,)),
    refused("stream_options.include_obfuscation", "chunks are not padded", (False,)),
    refused("messages[].function_call", _TOOLS, (), "chat"),
    refused("messages[].refusal", "put what was said into content", ("",), "chat"),
    refused("messages[].audio", _IMAGES, (), "chat"),
    refused("messages[].annotations", "put what matters into content", ([],), "chat"),
    refused("messages[].reasoning_content", "put what matters into content", ("",), "chat"),
)
