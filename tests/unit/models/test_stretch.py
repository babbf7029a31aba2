"""Stretching keeps the function, noise takes it away gradually, and calibration finds the way between."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from alignment.eagle.unrolled import guesses, read_target
from cluster.config.config import Config
from cluster.console import Stages
from cluster.local import stretched
from engine.eagle.config import EagleConfig
from engine.eagle.head import EagleHead
from engine.eagle.loading import load_alone, save
from models.growth import grow_to, stretch, stretch_eagle
from models.stretch import bisect_noise, calibrate_noise, greedy_acceptance

SIZES = [
    {"hidden_size": 128},
    {"layers": 5},
    {"intermediate_size": 200},
    {"hidden_size": 96, "layers": 7, "intermediate_size": 96},
    {"hidden_size": 256, "layers": 4},
]
BOTH = {"hidden_size": 128, "layers": 6}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    """A tiny random Llama whose norms and logits are far from uniform, with grouped heads."""
    return tiny_model(tied=request.param)


def tiny_model(*, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def tokens() -> Tensor:
    return torch.randint(0, 97, (4, 40), generator=torch.Generator().manual_seed(3))


@torch.inference_mode()
def logits(model: LlamaForCausalLM, tokens_BT: Tensor) -> Tensor:
    return model(tokens_BT, use_cache=False).logits


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(f"{k}={v}" for k, v in sizes.items()))
def test_without_noise_the_logits_are_the_same(model: LlamaForCausalLM, sizes: dict[str, int]) -> None:
    tokens_BT = tokens()
    before, after = logits(model, tokens_BT), logits(stretch(model, **sizes), tokens_BT)
    assert before.std() > 0.5, "the model under test must say something"
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    assert torch.equal(after.argmax(-1), before.argmax(-1))


def test_greedy_text_through_the_cache_is_the_same(model: LlamaForCausalLM) -> None:
    grown = stretch(model, **BOTH)
    prompt = tokens()[:1, :8]
    options = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(model.generate(prompt, **options), grown.generate(prompt, **options))


def test_the_stretched_sizes_are_real() -> None:
    grown = stretch(tiny_model(), **BOTH)
    added = grown.model.layers[1]
    assert (grown.config.num_attention_heads, grown.config.num_key_value_heads) == (8, 4)
    assert (grown.config.head_dim, grown.config.intermediate_size) == (16, 176)
    assert added.mlp.gate_proj.weight.shape == (176, 128)
    assert added.self_attn.q_proj.weight.abs().min() > 0, "work that is not heard must still be done"
    assert added.mlp.down_proj.weight.abs().max() == 0


def test_the_same_seed_gives_the_same_model() -> None:
    first, again = (stretch(tiny_model(), **BOTH, noise=0.5, seed=4) for _ in range(2))
    other = stretch(tiny_model(), **BOTH, noise=0.5, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(logits(first, tokens()), logits(other, tokens()))


def test_a_stretched_model_survives_saving(tmp_path: object) -> None:
    grown = stretch(tiny_model(), **BOTH, noise=0.3)
    grown.save_pretrained(str(tmp_path))
    loaded = LlamaForCausalLM.from_pretrained(str(tmp_path)).eval()
    torch.testing.assert_close(logits(loaded, tokens()), logits(grown, tokens()))


@pytest.mark.parametrize("sizes", [{"layers": 6}, {"hidden_size": 128}], ids=["depth", "width"])
def test_agreement_falls_as_noise_grows(sizes: dict[str, int]) -> None:
    model, tokens_BT = tiny_model(), tokens()
    reference = logits(model, tokens_BT).argmax(-1)
    grown = [stretch(model, **sizes, noise=noise) for noise in (0.0, 0.3, 3.0, 100.0)]
    agreement = [float((logits(each, tokens_BT).argmax(-1) == reference).float().mean()) for each in grown]
    assert agreement[0] == 1.0
    assert agreement == sorted(agreement, reverse=True)
    assert agreement[-1] < agreement[1] < 1.0 or agreement[-1] < 0.5


def test_calibration_reaches_the_wanted_acceptance() -> None:
    model, prompts = tiny_model(), tokens()[:, :12]
    found = calibrate_noise(model, model, prompts, 0.75, **BOTH, tokens=24, tolerance=0.05)
    assert found.noise > 0
    assert abs(found.agreement - 0.75) <= 0.05
    grown = stretch(model, **BOTH, noise=found.noise)
    assert greedy_acceptance(grown, model, prompts, 24) == pytest.approx(found.agreement)


def test_acceptance_ignores_what_follows_the_end_of_text() -> None:
    model, prompts = tiny_model(), tokens()[:, :12]
    assert greedy_acceptance(model, model, prompts, 24) == 1.0
    written = model.generate(prompts, max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(prompts))
    ending = tiny_model()
    ending.config.eos_token_id = ending.generation_config.eos_token_id = int(written[0, 14])
    assert greedy_acceptance(ending, model, prompts, 24) == 1.0


def test_bisection_stays_silent_when_the_draft_is_too_poor() -> None:
    found = bisect_noise(lambda noise: 0.6 - 0.01 * noise, wanted=0.8, tolerance=0.01, steps=5)
    assert (found.noise, found.agreement) == (0.0, 0.6)


def test_bisection_doubles_until_it_is_below() -> None:
    found = bisect_noise(lambda noise: 1 / (1 + noise / 50), wanted=0.5, tolerance=0.001, steps=40)
    assert found.noise == pytest.approx(50, rel=0.01)


IMPOSSIBLE = [{"hidden_size": 32}, {"hidden_size": 80}, {"layers": 2}, {"intermediate_size": 8}]


@pytest.mark.parametrize("sizes", IMPOSSIBLE)
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        stretch(tiny_model(), **sizes)


def test_a_stretched_eagle_head_drafts_the_same_from_the_stretched_target(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    config = EagleConfig(
        hidden_size=32,
        target_hidden_size=64,
        vocab_size=97,
        draft_vocab_size=97,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        aux_layers=(0, 1, 2),
    )
    head = EagleHead(config)
    with torch.no_grad():
        for number, parameter in enumerate(head.parameters()):
            parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(number))
    save(stretch_eagle(head, grow_to(model, **BOTH)), tmp_path, embedding=True, dtype=torch.float32)
    grown = load_alone(str(tmp_path), "", torch.device("cpu"), torch.float32)
    assert (grown.config.target_hidden_size, grown.config.aux_layers) == (128, (0, 2, 4))
    tokens_1T = tokens()[:1]
    with torch.inference_mode():
        aux_1TA, _ = read_target(model, tokens_1T, head.config)
        grown_aux_1TA, _ = read_target(stretch(model, **BOTH), tokens_1T, grown.config)
        torch.testing.assert_close(grown.fuse(grown_aux_1TA), head.fuse(aux_1TA), atol=1e-3, rtol=1e-3)
        expected, found = guesses(head, tokens_1T, aux_1TA, 4), guesses(grown, tokens_1T, grown_aux_1TA, 4)
    assert len(expected.unique()) > 20, "the head under test must say something"
    assert torch.equal(found, expected)


def test_the_stretched_target_has_the_bundled_ones_name_and_is_built_anew_when_that_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "target"
    source.mkdir()
    for index, name in enumerate(("model.safetensors", "chat_template.jinja")):
        (source / name).touch()
        os.utime(source / name, (1000 + index, 1000 + index))
    built: list[float] = []

    def build(_: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").touch()
        built.append(2000.0 + 10 * len(built))
        os.utime(folder / "model.safetensors", (built[-1], built[-1]))

    monkeypatch.setattr(stretched, "_stretch", build)
    monkeypatch.setattr(stretched, "BUNDLED", tmp_path)
    for changed, times in ((None, 1), (None, 1), (2005.0, 2)):
        if changed:
            os.utime(source / "chat_template.jinja", (changed, changed))
        config = stretched.stretched(Config(), Stages(None))
        assert config.target.name == Path(Config().target.model).name == "target"
        assert len(built) == times
