"""The published layouts of EAGLE-3 heads, what they compute, and every way in which a checkpoint does not fit."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.build import build_target
from engine.eagle.config import EagleConfig
from engine.eagle.head import EagleHead
from engine.eagle.loading import load_alone, load_beside, read, save
from engine.loading.loader import Model
from engine.model import ModelError
from engine.settings import EngineSettings
from tests.unit.engine.engine_models import as_hub_id, load_tiny, save_model

HIDDEN, VOCABULARY, DRAFT = 64, 256, 96
HEADS, KV_HEADS, SIZE, INNER = 4, 2, 16, 80
AUX = (0, 1, 2)
SAID: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": HIDDEN,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": DRAFT,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "intermediate_size": INNER,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 500.0,
    "eagle_aux_hidden_state_layer_ids": list(AUX),
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=2)


def tensors(layers: int = 1, draft: int = DRAFT, naming: str = "midlayer") -> dict[str, Tensor]:
    """Random weights under published names."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    named = {"fc.weight": random(HIDDEN, 3 * HIDDEN)}
    for layer in range(layers):
        at = "midlayer" if naming == "midlayer" and layer == 0 else f"layers.{layer}"
        read = HIDDEN * (2 if layer == 0 else 1)
        norms = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if layer == 0 else [])]
        named |= {f"{at}.{norm}.weight": random(HIDDEN) + 1 for norm in norms}
        named[f"{at}.self_attn.q_proj.weight"] = random(HEADS * SIZE, read)
        named[f"{at}.self_attn.k_proj.weight"] = random(KV_HEADS * SIZE, read)
        named[f"{at}.self_attn.v_proj.weight"] = random(KV_HEADS * SIZE, read)
        named[f"{at}.self_attn.o_proj.weight"] = random(HIDDEN, HEADS * SIZE)
        named |= {f"{at}.mlp.{part}_proj.weight": random(INNER, HIDDEN) for part in ("gate", "up")}
        named[f"{at}.mlp.down_proj.weight"] = random(HIDDEN, INNER)
    named |= {"norm.weight": random(HIDDEN) + 1, "lm_head.weight": random(draft, HIDDEN)}
    named["embed_tokens.weight"] = random(VOCABULARY, HIDDEN) * 3
    if draft < VOCABULARY:
        ids = torch.randperm(VOCABULARY, generator=generator)[:draft].sort().values
        named["d2t"] = ids - torch.arange(draft)
        named["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True)
    return named


def write(folder: Path, named: dict[str, Tensor], file: str = "model.safetensors", **said: Any) -> Path:
    folder.mkdir(exist_ok=True)
    told = {key: value for key, value in (SAID | said).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(told))
    if file.endswith(".safetensors"):
        save_file(named, folder / file)
    else:
        torch.save(named, folder / file)
    return folder


def nobody(name: str) -> Tensor:
    raise AssertionError(f"{name} was asked of the target")


class ByTheFormulae:
    """The head as papers write it: one token after another, sums over everything before, no cache and no batches."""

    def __init__(self, named: dict[str, Tensor], *, layers: int = 1, normed_residual: bool = False) -> None:
        self.weights = {name.replace("midlayer.", "layers.0."): tensor.double() for name, tensor in named.items()}
        self.layers, self.normed_residual = layers, normed_residual
        self.seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(layers)]

    def rms(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + 1e-5).sqrt() * self.weights[f"{name}.weight"]

    def turned(self, x: Tensor, position: int) -> Tensor:
        """Each pair (i, i + half) as a complex number, turned by its angle."""
        half = len(x) // 2
        angles = position * 500.0 ** -(torch.arange(half).double() / half)
        pairs = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half).double(), angles)
        return torch.cat((pairs.real, pairs.imag))

    def fused(self, aux: Tensor) -> Tensor:
        return self.weights["fc.weight"] @ aux.double()

    def step(self, token: int, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Next state, and logits over the tokens the head knows."""
        w = self.weights
        for layer in range(self.layers):
            at = f"layers.{layer}"
            if layer == 0:
                normed = self.rms(state, f"{at}.hidden_norm")
                embedding = self.rms(w["embed_tokens.weight"][token], f"{at}.input_layernorm")
                read = torch.cat((embedding, normed))
                state = normed if self.normed_residual else state
            else:
                read = self.rms(state, f"{at}.input_layernorm")
            q, k, v = (w[f"{at}.self_attn.{part}_proj.weight"] @ read for part in "qkv")
            key = torch.stack([self.turned(part, position) for part in k.view(KV_HEADS, SIZE)])
            self.seen[layer].append((key, v.view(KV_HEADS, SIZE)))
            heard = []
            for number, part in enumerate(q.view(HEADS, SIZE)):
                group, query = number * KV_HEADS // HEADS, self.turned(part, position)
                scores = torch.stack([query @ keys[group] / SIZE**0.5 for keys, _ in self.seen[layer]])
                shares = scores.exp() / scores.exp().sum()
                parts = [share * values[group] for share, (_, values) in zip(shares, self.seen[layer], strict=True)]
                heard.append(torch.stack(parts).sum(0))
            state = state + w[f"{at}.self_attn.o_proj.weight"] @ torch.cat(heard)
            x = self.rms(state, f"{at}.post_attention_layernorm")
            gate = w[f"{at}.mlp.gate_proj.weight"] @ x
            inner = gate / (1 + (-gate).exp()) * (w[f"{at}.mlp.up_proj.weight"] @ x)
            state = state + w[f"{at}.mlp.down_proj.weight"] @ inner
        return state, w["lm_head.weight"] @ self.rms(state, "norm")


class Cached:
    """The simplest cache a head can be given: all keys and values so far, of one sequence."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = self.kept.get(layer)
        keys, values = (k, v) if before is None else (torch.cat((before[0], k)), torch.cat((before[1], v)))
        self.kept[layer] = keys, values
        groups = q.shape[1] // k.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        scores = torch.einsum("nqe,mqe->qnm", q, keys) * q.shape[-1] ** -0.5
        allowed = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(keys) - len(q))
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        return torch.einsum("qnm,mqe->nqe", weights, values)


def drafted(head: EagleHead, aux: Tensor, tokens: list[int], count: int) -> tuple[list[int], Tensor]:
    """``count`` greedy guesses behind ``tokens``, the first of which has no state before it, and all logits."""
    attend, said, guesses = Cached(), [], []
    states, positions = head.fuse(aux), torch.arange(len(tokens) - 1)
    row = torch.tensor(tokens[1:])
    for step in range(count):
        states, normed = head(head.embed(row), states, positions, attend)
        said.append(head.logits(normed)[-1])
        guesses.append(int(head.target_ids[said[-1].argmax()]))
        states, row, positions = states[-1:], torch.tensor(guesses[-1:]), torch.tensor([len(tokens) - 1 + step])
    return guesses, torch.stack(said)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("naming", ["midlayer", "layers"])
@pytest.mark.parametrize("draft", [DRAFT, VOCABULARY])
@pytest.mark.parametrize(("layers", "normed"), [(1, False), (1, True), (2, False)])
def test_a_published_head_drafts_what_the_formulae_say(
    tmp_path: Path, file: str, naming: str, draft: int, layers: int, normed: bool
) -> None:
    named = tensors(layers, draft, naming)
    folder = write(
        tmp_path / "head", named, file, draft_vocab_size=draft, num_hidden_layers=layers, norm_before_residual=normed
    )
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (7,), generator=generator).tolist()
    aux = torch.randn(6, 3 * HIDDEN, generator=generator)

    with torch.inference_mode():
        guesses, said = drafted(load_alone(str(folder), "", CPU, torch.float32), aux, tokens, 4)

    plain = ByTheFormulae(named, layers=layers, normed_residual=normed)
    for position, token in enumerate(tokens[1:]):
        state, logits = plain.step(token, plain.fused(aux[position]), position)
    for step in range(4):
        torch.testing.assert_close(said[step].double(), logits, atol=1e-4, rtol=1e-4)
        said_id = int(logits.argmax())
        assert guesses[step] == said_id + (int(named["d2t"][said_id]) if draft < VOCABULARY else 0)
        state, logits = plain.step(guesses[step], state, len(tokens) - 1 + step)


def test_norms_of_newer_heads_are_where_they_are_told(tmp_path: Path) -> None:
    named = tensors() | {"input_norm.weight": torch.full((3 * HIDDEN,), 2.0)}
    named |= {f"fc_norm.{i}.weight": torch.full((HIDDEN,), 0.5 + i) for i in range(3)}
    folder = write(tmp_path / "head", named, norm_before_fc=True, fc_norm=True, norm_output=True)
    head = load_alone(str(folder), "", CPU, torch.float32)
    aux = torch.randn(2, 3 * HIDDEN, generator=torch.Generator().manual_seed(1))

    def rms(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    wanted = torch.cat([rms(part) * (0.5 + i) for i, part in enumerate((rms(aux) * 2).chunk(3, -1))], -1)
    with torch.inference_mode():
        torch.testing.assert_close(head.fuse(aux), wanted @ named["fc.weight"].T, atol=1e-4, rtol=1e-4)
        state, normed = head(head.embed(torch.tensor([1, 2])), head.fuse(aux), torch.arange(2), Cached())
    torch.testing.assert_close(state, normed)


def test_what_is_left_out_is_the_targets(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tensors()
    own: Any = model.module
    embedding, output = own.get_input_embeddings().weight, own.get_output_embeddings()
    del named["embed_tokens.weight"], named["lm_head.weight"]
    folder = write(tmp_path / "head", named)
    head = load_beside(str(folder), model)
    torch.testing.assert_close(head.embed(torch.arange(VOCABULARY)), embedding)
    ids = torch.arange(DRAFT) + named["d2t"]
    states = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(head.logits(states), output(states)[:, ids], atol=1e-5, rtol=1e-5)
        for target in (model.name, as_hub_id(model.name, tmp_path / "hub", monkeypatch)):
            alone = load_alone(str(folder), target, CPU, torch.float32)
            torch.testing.assert_close(alone.logits(states), head.logits(states))
            torch.testing.assert_close(alone.embed(torch.arange(9)), embedding[:9])
    with pytest.raises(ModelError, match=r"leaves 'embed_tokens.weight' to the target.*Org/Other holds none.*here"):
        load_alone(str(folder), "Org/Other", CPU, torch.float32)
    with pytest.raises(ModelError, match=r"leaves 'embed_tokens.weight' to the target.*name the target's folder"):
        load_alone(str(folder), "", CPU, torch.float32)


def test_an_output_layer_of_the_targets_is_put_in_the_order_of_the_heads_tokens(tmp_path: Path) -> None:
    """Also where the head knows all of them: as ``d2t`` has them, here the last first."""
    named = tensors(draft=VOCABULARY)
    named["d2t"], output = VOCABULARY - 1 - 2 * torch.arange(VOCABULARY), named.pop("lm_head.weight")
    head = read(write(tmp_path, named, draft_vocab_size=VOCABULARY), lambda _: output)
    assert torch.equal(head.lm_head.weight, output.flip(0))


def test_an_embedding_of_another_size_is_named_though_it_is_the_output_layer_too(tmp_path: Path) -> None:
    named = tensors(draft=VOCABULARY) | {"embed_tokens.weight": torch.zeros(200, HIDDEN)}
    del named["lm_head.weight"]
    folder = write(tmp_path / "head", named, draft_vocab_size=VOCABULARY, tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"'embed_tokens.weight' has the shape \[200, 64\]; .* must have \[256, 64\]"):
        read(folder, nobody)


def test_what_is_saved_has_the_published_layout_and_is_read_again(tmp_path: Path) -> None:
    named = tensors()
    first = read(write(tmp_path / "head", named), nobody)
    save(first, tmp_path / "again", embedding=True, dtype=torch.float32)
    again = read(tmp_path / "again", nobody)
    assert replace(again.config, rope_parameters={}) == replace(first.config, rope_parameters={})
    assert again.config.rope_parameters["rope_theta"] == first.config.rope_parameters["rope_theta"] == 500.0
    assert torch.equal(again.target_ids, torch.arange(DRAFT) + named["d2t"])
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_the_rotation_stays_precise_in_bfloat16(tmp_path: Path) -> None:
    head = load_alone(str(write(tmp_path / "head", tensors())), "", CPU, torch.bfloat16)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in head.rotary_emb.buffers()} == {torch.float32}


def test_layers_are_counted_as_each_layout_counts_them(tmp_path: Path) -> None:
    def config(**said: Any) -> EagleConfig:
        return EagleConfig.from_folder(write(tmp_path / "head", {}, **said))

    none = {"eagle_aux_hidden_state_layer_ids": ...}
    assert config(**none).aux_layers_of(32) == (2, 16, 29)
    assert config(eagle_aux_hidden_state_layer_ids=[1, 5, 8]).aux_layers_of(8) == (1, 5, 8)
    inner = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}
    assert config(**none, **inner).aux_layers_of(32) == (2, 16, 29)
    nested = {key: value for key, value in SAID.items() if key not in ("architectures", "draft_vocab_size")}
    speculators = {"speculators_model_type": "eagle3", "draft_vocab_size": DRAFT, "transformer_layer_config": nested}
    folder = tmp_path / "speculators"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Eagle3DraftModel"], **speculators}))
    found = EagleConfig.from_folder(folder)
    assert (found.hidden_size, found.draft_vocab_size, found.norm_before_residual) == (HIDDEN, DRAFT, True)
    with pytest.raises(ModelError, match=r"for another target: .* hidden states \[0, 9\], this target has 0 to 8"):
        replace(found, aux_layers=(0, 9)).aux_layers_of(8)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"medusa_num_heads": 4}, "Medusa heads, not an EAGLE-3 head.*; train .*: paceline align eagle"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "an EAGLE-1 or EAGLE-2 head"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "eagle"}, "an EAGLE-1 or EAGLE-2 head"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "of another family .Eagle3DeepseekV2ForCausalLM."),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": ...}, "a full model or an EAGLE-1 head.*--draft"),
        ({"architectures": ["DFlashDraftModel"]}, "another drafter .DFlashDraftModel."),
        ({"hidden_size": ...}, "has no hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number from 1 to .*, got '64'"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads must be a divisor of num_attention_heads \(4\), got 3"),
        ({"draft_vocab_size": 257}, r"draft_vocab_size must be at most vocab_size \(256\), got 257"),
        ({"norm_before_residual": "yes"}, "norm_before_residual must be true or false, got 'yes'"),
        ({"hidden_act": "relish"}, "hidden_act must be an activation"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number between 0 and 1, got 0"),
        ({"eagle_aux_hidden_state_layer_ids": [1, -1]}, "must be a list of up to 16 layers of the target"),
        ({"rope_scaling": {"rope_type": "nonsense"}}, "rope_type must be one of default, .*, got 'nonsense'"),
    ],
)
def test_other_kinds_and_wrong_values_are_refused_by_name(tmp_path: Path, said: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        EagleConfig.from_folder(write(tmp_path / "head", {}, **said))


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda named: named | {"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}, "an EAGLE-1 or EAGLE-2 head"),
        (lambda named: {k: v for k, v in named.items() if "fc." not in k}, "a full model or another drafter"),
        (lambda named: {k: v for k, v in named.items() if "down" not in k}, "lacks 1 tensors.*mlp.down_proj.weight"),
        (lambda named: named | {"lid.weight": torch.zeros(1)}, "has 1 tensors too many, first 'lid.weight'"),
        (lambda named: named | {"norm.weight": torch.ones(3)}, r"'norm.weight' has the shape \[3\].*must have \[64\]"),
        (lambda named: named | {"norm.weight": torch.full((HIDDEN,), float("nan"))}, "NaN or infinite"),
        (lambda named: named | {"norm.weight": torch.ones(HIDDEN, dtype=torch.int8)}, "floating-point"),
        (
            lambda named: named | {"norm.weight": torch.ones(HIDDEN).to(torch.float8_e4m3fn)},
            "'norm.weight' holds torch.float8_e4m3fn, and quantised heads are not read",
        ),
        (lambda named: {k: v for k, v in named.items() if k not in ("d2t", "t2d")}, "lacks 'd2t'"),
        (lambda named: named | {"d2t": named["d2t"] + 200}, "'d2t' must hold offsets"),
        (lambda named: named | {"d2t": named["d2t"][1:]}, r"must hold integers, \[96\]"),
        (lambda named: named | {"t2d": ~named["t2d"]}, "tell of different tokens"),
        (
            lambda named: named | {"medusa_head.0.0.linear.weight": torch.zeros(1)},
            "Medusa heads, not an EAGLE-3 head; train one in their place: paceline align eagle",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: Change, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        read(write(tmp_path / "head", change(tensors())), nobody)


@pytest.mark.parametrize("theta", ["500", 0, -500.0])
def test_a_rotation_without_frequencies_is_refused(tmp_path: Path, theta: object) -> None:
    folder = write(tmp_path / "head", tensors(), rope_theta=..., rope_parameters={"rope_theta": theta})
    with pytest.raises(ModelError, match=r"config\.json: rope_parameters .* cannot be used: .*"):
        read(folder, nobody)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"target_hidden_size": 32}, "reads hidden states of 32 numbers, .* has 64"),
        ({"vocab_size": 999}, "knows 999 tokens, .* has 256"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 40]}, r"for another target.*\[0, 1, 40\], this target has 0 to 2"),
    ],
)
def test_a_head_of_another_target_is_refused(model: Model, tmp_path: Path, said: dict[str, Any], told: str) -> None:
    config = EagleConfig.from_folder(write(tmp_path / "said", {}, **said))
    save(EagleHead(config), tmp_path / "head")  # before the target's embedding is taken for its own
    with pytest.raises(ModelError, match=told):
        load_beside(str(tmp_path / "head"), model)


def test_no_folder_no_config_and_no_weights_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        EagleConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"it has no config.json"):
        EagleConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="must hold an object, got list"):
        EagleConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json: cannot be read"):
        EagleConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SAID))
    with pytest.raises(ModelError, match="has no weights"):
        read(tmp_path, nobody)


class Harmful:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return print, ("this must not run",)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "head", tensors(), file)
    whole = (folder / file).read_bytes()
    for wrong in (b"", b"not tensors", whole[: len(whole) // 2], pickle.dumps({"fc.weight": Harmful()}, 2)):
        (folder / file).write_bytes(wrong)
        with pytest.raises(ModelError, match=f"{file}: cannot be read") as refused:
            read(folder, nobody)
        assert "\n" not in str(refused.value)
    assert "must not run" not in capsys.readouterr().out


def test_a_file_of_something_else_than_tensors_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", {}, "pytorch_model.bin")
    torch.save([1, 2], folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="must hold tensors by name"):
        read(folder, nobody)


def test_a_model_that_cannot_speculate_takes_no_head(tmp_path: Path) -> None:
    folder, head = save_model("mamba", tmp_path / "model"), write(tmp_path / "head", tensors())
    with pytest.raises(ModelError, match="cannot use an EAGLE-3 head: model type 'mamba' cannot speculate"):
        build_target(EngineSettings(folder, device="cpu", dtype="fp32", eagle=str(head)))
