"""vLLM's ``--speculative-config``: the same JSON, taken as settings of our own.

What it says of drafting is carried out; of what a setting here decides otherwise, or nothing does, each key is refused
by name with what to do instead. A key with null is as good as left out, as in vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from cluster.config.config import SpeculationConfig
from cluster.config.settings import ConfigError, Override, described, nearest

FLAG = "--speculative-config"
NGRAM, SUFFIX, DRAFT_MODEL, EAGLE = "ngram", "suffix", "draft_model", "eagle3"
_MTP = ("mtp", "deepseek_mtp", "glm4_moe_mtp")
_USE = "use method draft_model with a small model of the same tokenizer, or ngram"
_OTHER_METHODS = {
    "medusa": "Medusa heads are not served any more; train an EAGLE-3 head (paceline align eagle) for method eagle3",
    "mlp_speculator": f"MLP speculators are not supported; {_USE}",
    "eagle": f"heads of EAGLE-1 and EAGLE-2 are not supported, those of EAGLE-3 are, as method eagle3; {_USE}",
    "dflash": f"DFlash drafters are not supported; {_USE}",
    **dict.fromkeys(
        ("mimo_mtp", "ernie_mtp", "qwen3_next_mtp", "longcat_flash_mtp"),
        f"multi-token prediction layers of this family are not supported; {_USE}",
    ),
}
"""Methods of vLLM that are refused: why, and what to do instead."""
_INSTEAD = {
    "disable_by_batch_size": "drafts are verified only while they pay, at every batch size; leave it out",
    "speculative_disable_by_batch_size": "drafts are verified only while they pay, at every batch size; leave it out",
    "max_model_len": "a drafter stops where its own model's context ends; leave it out",
    "revision": "write it into model, as HUB-ID@COMMIT",
    "code_revision": "code of models is never run",
    "enforce_eager": "use --set draft.plain_cuda=true",
    "parallel_drafting": "drafters run ahead on workers of their own; leave it out",
    "speculative_token_tree": "trees grow by likelihood; see --set speculation.children=N and speculation.width=N",
    "disable_logprobs": "log-probabilities are the target's own, with drafts and without; leave it out",
    "disable_mqa_scorer": "drafts are verified in one pass; leave it out",
    "disable_padded_drafter_batch": "batches are not padded; leave it out",
    "posterior_threshold": "the text is always the target's own; leave it out",
    "posterior_alpha": "the text is always the target's own; leave it out",
    "draft_load_config": "a drafter loads its model as a target does; leave it out",
    **dict.fromkeys(
        (
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        ),
        "what is kept of earlier outputs is counted in tokens; use --set target.suffix_tokens=N",
    ),
}
_RULES = {"rejection_sampler": "rejection", "strict": "rejection", "standard": "rejection"}


def overrides(text: str) -> list[Override]:
    """The settings that the JSON of the flag stands for. Raises :class:`cluster.config.settings.ConfigError`."""
    given = _read(text)
    for key in given:
        if key in _INSTEAD:
            raise ConfigError(f"{FLAG}: {key} has no meaning here: {_INSTEAD[key]}")
        if key not in _MAPPED and key not in ("method", "model"):
            near = nearest(key, [*_MAPPED, *_INSTEAD, "method", "model"])
            hint = f"did you mean {near!r}?" if near else f"keys are method, model, {', '.join(_MAPPED)}"
            raise ConfigError(f"{FLAG}: unknown key {key!r}; {hint}")
    found = [("method", _method(given))]
    for key, mapped in _MAPPED.items():
        if key in given:
            found.append((key, {mapped: given[key]} if isinstance(mapped, str) else mapped(given[key])))
    return [
        Override(setting, value if isinstance(value, str) else json.dumps(value), f"{FLAG} {key}")
        for key, settings in found
        for setting, value in settings.items()
    ]


def _read(text: str) -> dict[str, object]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{FLAG}: not JSON ({' '.join(str(error).split())}), got {text[:60]!r}") from None
    if not isinstance(given, dict):
        raise ConfigError(f'{FLAG}: must be a JSON object such as {{"method": "ngram"}}, got {described(given)}')
    return {key: value for key, value in given.items() if value is not None}


def _method(given: Mapping[str, object]) -> dict[str, object]:
    """What drafts. vLLM takes ``"model": "ngram"`` for the method of that name, and any other model for a draft."""
    model = given.get("model", "")
    method = given.get("method", NGRAM if model in (NGRAM, f"[{NGRAM}]") else DRAFT_MODEL)
    if method in (NGRAM, f"[{NGRAM}]", SUFFIX):
        return {"speculation.lookup": True, "speculation.drafters": False}
    if method in _MTP:
        return {"target.eagle": "mtp", "speculation.drafters": False}
    if method == EAGLE:
        if not model:
            raise ConfigError(f"{FLAG}: method {method} needs a model: the folder of the EAGLE-3 head")
        return {"target.eagle": model, "speculation.drafters": False}
    if method != DRAFT_MODEL:
        raise ConfigError(f"{FLAG}: {_OTHER_METHODS.get(str(method), f'there is no method {method!r}; {_USE}')}")
    return {"speculation.drafters": True} | ({"draft.model": model} if model else {})


def _depth(value: object) -> dict[str, object]:
    """A draft longer than what is verified for a session by default needs more room."""
    longer = isinstance(value, int) and value > SpeculationConfig().max_draft
    return {"speculation.max_depth": value} | ({"speculation.max_draft": value} if longer else {})


def _longest(value: object) -> dict[str, object]:
    """A single token is below what lookup asks for unless told."""
    return {"speculation.lookup_max": value} | ({"speculation.lookup_min": 1} if value == 1 else {})


def _rule(value: object) -> dict[str, object]:
    if str(value) not in _RULES:
        instead = "leave it out (the coupled rule), or use rejection_sampler"
        raise ConfigError(f"{FLAG}: {value!r} would change the text; {instead}")
    return {"speculation.rule": _RULES[str(value)]}


_MAPPED: dict[str, str | Callable[[object], dict[str, object]]] = {
    "num_speculative_tokens": _depth,
    "prompt_lookup_max": _longest,
    "prompt_lookup_min": "speculation.lookup_min",
    "draft_tensor_parallel_size": "draft.tensor_parallel_size",
    "quantization": "draft.quantization",
    "acceptance_method": _rule,
    "rejection_sample_method": _rule,
}
