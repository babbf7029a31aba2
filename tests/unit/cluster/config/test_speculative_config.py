"""vLLM's JSON for drafting comes to settings of ours, or to one line that says what to do instead."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.cli import main
from cluster.config.config import Config, load
from cluster.config.serving import speculation
from cluster.config.settings import ConfigError
from cluster.config.speculative_config import overrides
from speculation.events import Role
from speculation.messages import AllBut, Rule, Source


def configured(**given: Any) -> Config:
    return load(None, overrides(json.dumps(given)))


def test_ngram_is_prompt_lookup_without_draft_workers() -> None:
    config = configured(method="ngram", num_speculative_tokens=5, prompt_lookup_max=4, prompt_lookup_min=3)
    assert speculation(config).sources == AllBut(frozenset({Source.DRAFT}))
    assert speculation(config).max_depth == 5
    assert (config.speculation.lookup_min, config.speculation.lookup_max) == (3, 4)
    assert [pool.role for pool in config.pools()] == [Role.TARGET]
    assert configured(model="[ngram]").speculation == configured(method="ngram").speculation
    assert configured(method="suffix") == configured(method="ngram")
    assert configured(method="ngram", prompt_lookup_max=1).speculation.lookup_min == 1


def test_a_draft_model_gets_its_settings() -> None:
    config = configured(
        model="./small", num_speculative_tokens=20, draft_tensor_parallel_size=2, quantization="fp8", revision=None
    )
    assert (config.draft.model, config.draft.tensor_parallel_size, config.draft.quantization) == ("./small", 2, "fp8")
    assert (config.speculation.max_depth, config.speculation.max_draft) == (20, 20)
    assert speculation(config).sources == AllBut()
    assert configured(num_speculative_tokens=3).draft == Config().draft
    assert configured(num_speculative_tokens=3).speculation.max_draft == Config().speculation.max_draft
    assert speculation(configured(method="draft_model", acceptance_method="rejection_sampler")).rule is Rule.REJECTION


def test_an_eagle_head_needs_no_draft_workers() -> None:
    config = configured(method="eagle3", model="./head", num_speculative_tokens=5)
    assert (config.target.eagle, config.speculation.max_depth) == ("./head", 5)
    assert speculation(config).sources == AllBut(frozenset({Source.DRAFT}))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('{"method": "eagle3"}', "method eagle3 needs a model: the folder of the EAGLE-3 head"),
        ('{"method": "eagle", "model": "x"}', "heads of EAGLE-1 and EAGLE-2 are not supported, those of EAGLE-3 are"),
        ('{"method": "nonsense"}', "there is no method 'nonsense'; use method draft_model"),
        ('{"suffix_decoding_max_cached_requests": 9}', "counted in tokens; use --set target.suffix_tokens=N"),
        (
            '{"method": "medusa", "model": "x", "num_speculative_tokens": 4}',
            "Medusa heads are not served any more; train an EAGLE-3 head (paceline align eagle) for method eagle3",
        ),
        ('{"method": "medusa"}', "Medusa heads are not served any more"),
        (
            '{"method": "dflash", "model": "x"}',
            "DFlash drafters are not supported; use method draft_model with",
        ),
        ('{"disable_by_batch_size": 8}', "disable_by_batch_size has no meaning here: drafts are verified only while"),
        ('{"num_speculativ_tokens": 5}', "unknown key 'num_speculativ_tokens'; did you mean 'num_speculative_tokens'?"),
        ('{"num_speculative_tokens": 500}', "num_speculative_tokens: speculation.max_depth must be a whole number fr"),
        ('{"num_speculative_tokens": "x"}', "num_speculative_tokens: speculation.max_depth must be a whole number fr"),
        ('{"acceptance_method": "typical_acceptance_sampler"}', "would change the text"),
        ('{"quantization": "awq"}', "quantization: draft.quantization must be one of none, int8"),
        ('{"prompt_lookup_min": 9}', "speculation.lookup_min is 9; it must be at most speculation.lookup_max (8)"),
        ('{"method": ["ngram"]}', "there is no method"),
        ("[1]", "must be a JSON object"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(None, overrides(given))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("command", [["up"], ["router", "--target", "127.0.0.1:1"]])
def test_commands_take_the_flag_and_end_in_one_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--speculative-config", '{"method": "eagle"}']) == 2
    assert "heads of EAGLE-1 and EAGLE-2 are not supported" in capsys.readouterr().err
