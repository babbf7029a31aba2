"""Loading: what comes out, what is refused and with which words, and a self-test that finds planted faults."""

from __future__ import annotations

import ctypes
import json
import math
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cluster.config.checks import CheckError, check_model
from draft_service.translation import read_vocabularies
from engine.attention import attention, row_attention
from engine.attention.row_attention import RowAttention, UnsupportedAttention
from engine.cache.kv_store import KVStore
from engine.cpu.rows import CpuRows
from engine.cpu.thread_choice import COUNTS
from engine.layers.linear import PackedLinear, can_pack
from engine.loading import checkpoint, loader
from engine.loading.loader import ModelError, describe, load
from engine.model import CannotSpeculate, Model
from engine.parallel.group import Group
from router.text.tokenizer import Tokenizer as RoutersTokenizer
from speculation.messages import Loading
from tests.by_rows import PlainRows
from tests.stack import MODELS
from tests.unit.engine.engine_models import load_tiny, save_model

SERVED = ["llama", "qwen3", "mistral", "gemma2", "gpt2", "gpt_oss"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    return folder


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("family", SERVED)
def test_served_families_pass_the_self_test(family: str, dtype: str, tmp_path: Path) -> None:
    told: list[Loading] = []
    model = load(save_model(family, tmp_path), dtype=dtype, device="cpu", progress=told.append)
    assert told[-1].doing.startswith("self-test passed")
    assert (model.layers, model.vocabulary, model.context) == (3, 256, 256)


def test_what_a_model_says_of_itself(llama: Path) -> None:
    model = load(str(llama), dtype="fp32", device="cpu", by_rows=False)
    assert model.name == str(llama)
    assert model.stop_tokens == {2}
    assert model.tokenizer_digest == 0
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
    assert isinstance(model.module.lm_head, PackedLinear) == can_pack(torch.empty(1))  # type: ignore[union-attr]
    assert not model.module.training


def test_unpacked_and_float64(llama: Path) -> None:
    model = load(str(llama), dtype="float64", device="cpu", pack=False)
    assert isinstance(model.module.lm_head, torch.nn.Linear)  # type: ignore[union-attr]
    assert model.dtype == torch.float64


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped")
def test_the_checkpoint_does_not_stay_in_memory(llama: Path) -> None:
    """Its pages would count a second time, beside the packed weights made from them."""
    model = load(str(llama), dtype="float32", device="cpu", self_test=False)
    assert str(llama) not in Path("/proc/self/maps").read_text()
    del model


def test_a_gpu_gets_the_weights_straight_from_the_files(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by way of a copy in the host's memory. Tried with a GPU that is the CPU by another name."""
    asked: list[Any] = []
    read = AutoModelForCausalLM.from_pretrained

    def noted(*args: Any, device_map: Any, **options: Any) -> Any:
        asked.append(device_map)
        return read(*args, device_map=device_map and {"": torch.device("cpu")}, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noted)
    gpu, cpu = (torch.device(name) for name in ("cuda", "cpu"))
    straight, plain = (checkpoint.read_module(str(llama), torch.bfloat16, device, None) for device in (gpu, cpu))
    assert asked == [{"": gpu}, None]
    expected = plain.state_dict()
    assert straight.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in straight.state_dict().items())
    assert not straight.training and not any(weight.requires_grad for weight in straight.parameters())
    assert not any(hasattr(module, "_hf_hook") for module in straight.modules()), "steps run through hooks"


@pytest.mark.parametrize("by_rows", [True, False])
def test_a_model_speculates_where_no_kernel_can_be_launched(by_rows: bool, llama: Path, monkeypatch) -> None:
    """Then torch attends, and moves slots, as it does where kernels are ruled out."""
    made = KVStore.__init__

    def as_on_a_gpu(self: KVStore, *args: Any, kernels: bool = False, **how: Any) -> None:
        made(self, *args, kernels=kernels, **how)
        self._kernels = kernels

    def fail(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(KVStore, "__init__", as_on_a_gpu)
    monkeypatch.setattr(KVStore, "_move_together", fail)
    monkeypatch.setattr(loader, "find_attention", lambda *_: PlainRows(2))
    monkeypatch.setattr(loader.Treatment, "in_cpp", lambda *_: False)
    model = load(str(llama), device="cpu", dtype="fp32", by_rows=by_rows)
    assert not model.no_speculation and model.attention and not model.attention.replayed


def test_auto_dtype_follows_the_processor(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for features, expected in (({"avx512_bf16": True}, torch.bfloat16), ({}, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda features=features: features)
        assert load(str(llama), device="cpu", self_test=False).dtype == expected


@pytest.mark.parametrize(("has_bfloat16", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_dtype_follows_the_gpu(has_bfloat16: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that emulates bfloat16 does not have it; asked is the one that is computed on."""
    current = [0]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    def supported(including_emulation: bool = True) -> bool:
        return including_emulation or (has_bfloat16 and current[-1] == 1)

    if not torch.cuda.is_available():
        assert loader.choose_dtype("auto", torch.device("cuda:1")) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert loader.choose_dtype("auto", torch.device("cuda:1")) == expected
    assert loader.choose_dtype("fp16", torch.device("cuda:1")) == torch.float16


@pytest.mark.parametrize(
    ("built_for", "devices", "library", "hint"),
    [
        (None, [], False, "for the CPU: take the image, or the wheel, for CUDA"),
        ("13.0", [], True, "there is no /dev/nvidiactl: request nvidia.com/gpu, or set the runtime class nvidia"),
        ("13.0", ["nvidiactl"], False, "libcuda.so.1 is not found: add where the driver's libraries lie to LD_LIBRARY"),
        ("13.0", ["nvidiactl"], True, ""),  # torch says that the driver is too old
    ],
)
def test_why_a_gpu_cannot_be_used_is_said(
    built_for: str | None, devices: list[str], library: bool, hint: str, tmp_path: Path, monkeypatch
) -> None:
    def found(name: str) -> None:
        if not library:
            raise OSError(name)

    for name in devices:
        (tmp_path / name).touch()
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(ctypes, "CDLL", found)
    hints = checkpoint.no_cuda_hint(tmp_path)
    assert [hint in line for line in hints] == [True] * bool(hint)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_asked_for_and_cannot_be_used_is_an_error(llama: Path) -> None:
    with pytest.raises(loader.ModelError, match=r"device 'cuda' cannot be used here: .*; .* for CUDA|nvidiactl|LD_LIB"):
        load(str(llama), device="cuda")


def test_stop_tokens_come_from_both_configurations(tmp_path: Path) -> None:
    folder = Path(save_model("llama", tmp_path))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, 4000]}))
    assert load(str(folder), self_test=False).stop_tokens == {2, 7, 9}


def add_tokenizer(folder: Path, words: int) -> None:
    vocabulary = {f"w{n}": n for n in range(words)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "w0"))).save_pretrained(folder)


def test_padded_rows_are_not_vocabulary(tmp_path: Path) -> None:
    folder = Path(save_model("llama", tmp_path))
    add_tokenizer(folder, 200)
    one = load(str(folder))
    assert one.vocabulary == 200
    assert 0 < one.tokenizer_digest < 2**64
    add_tokenizer(folder, 201)
    other = load(str(folder), self_test=False)
    assert other.vocabulary == 201
    assert other.tokenizer_digest != one.tokenizer_digest


@pytest.mark.parametrize(
    ("named", "value"), [("pad_token", "[PAD]"), ("extra_special_tokens", ["<|new|>"]), ("unk_token", "<unk>")]
)
def test_tokens_named_beside_the_tokenizer_are_not_vocabulary(named: str, value: Any, tmp_path: Path) -> None:
    """transformers saves them so, and appends them when it reads the folder; routers read tokenizer.json alone."""
    folder = Path(save_model("llama", tmp_path, vocab_size=4096))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "target" / name, folder)
    plain = describe(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    setattr(tokenizer, named, value)
    tokenizer.save_pretrained(folder)
    assert len(AutoTokenizer.from_pretrained(folder)) > plain.vocabulary
    named_beside = describe(str(folder))
    assert named_beside.tokenizer_digest == plain.tokenizer_digest == RoutersTokenizer.load(str(folder)).digest
    assert named_beside.vocabulary == plain.vocabulary == RoutersTokenizer.load(str(folder)).size
    assert read_vocabularies(str(folder), str(MODELS / "target")) is None, "drafts would be translated"
    other = read_vocabularies(str(MODELS / "draft_other"), str(folder))
    assert other is not None and (other.digest, other.target_size) == (plain.tokenizer_digest, plain.vocabulary)


@pytest.mark.parametrize("named", [{"eos_token": "<|im_end|>"}, {"extra_special_tokens": ["<|im_end|>"]}])
def test_a_token_that_ends_texts_stays_in_the_vocabulary(named: dict[str, Any], tmp_path: Path) -> None:
    """Routers refuse such a folder; to serve it without would have its texts never end."""
    folder = Path(save_model("llama", tmp_path))
    add_tokenizer(folder, 200)
    plain = describe(str(folder))
    said = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(said | named))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [0, 200]}))
    named_beside = describe(str(folder))
    assert (plain.vocabulary, named_beside.vocabulary) == (200, 201)
    assert named_beside.tokenizer_digest != plain.tokenizer_digest


def test_a_folder_without_tokenizer_files_gets_no_invented_one(tmp_path: Path) -> None:
    model = load(save_model("qwen3", tmp_path), self_test=False)
    assert (model.vocabulary, model.tokenizer_digest) == (256, 0)


@pytest.mark.parametrize("path", ["no/such/folder", "./missing", "/missing", "~/missing-model", "missing", "a/", "/"])
def test_missing_paths_are_refused_without_network(path: str) -> None:
    with pytest.raises(ModelError, match=re.escape(path)):
        load(path)


def test_a_missing_folder_beside_existing_ones_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelError, match="models/target: no such folder"):
        load("models/target")


def test_a_failing_hub_becomes_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no connection\nand a long explanation")

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    with pytest.raises(ModelError) as caught:
        load("Org/Name")
    assert str(caught.value) == "Org/Name: cannot read the configuration: no connection"


def test_not_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="is a file"):
        load(str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "cannot read the configuration"),
        ("{}", "cannot read the configuration"),
        ('{"model_type": "no_such_type"}', "cannot read the configuration"),
        ('{"model_type": "t5"}', "'t5' is not a causal language model"),
        ('{"model_type": "llama", "vocab_size": "many"}', "error for field 'vocab_size': TypeError: .* got str"),
    ],
)
def test_bad_configurations(config: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=message) as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["configuration", "tokenizer"])
def test_code_in_a_model_folder_is_not_run(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does anything ask whether to."""
    folder, where = Path(save_model("llama", tmp_path / "model")), tmp_path / "ran"
    made = {
        "config.json": {"model_type": "foo", "auto_map": {"AutoConfig": "code.Own"}},
        "tokenizer_config.json": {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}},
    }
    name = "config.json" if part == "configuration" else "tokenizer_config.json"
    (folder / name).write_text(json.dumps(made[name]))
    (folder / "code.py").write_text(f"open({str(where)!r}, 'w')\nclass Own: model_type = 'foo'\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=f"cannot read the {part}: it brings code of its own, which is not run"):
        describe(str(folder))
    assert not where.exists()


def test_missing_weights(tmp_path: Path) -> None:
    folder = Path(save_model("llama", tmp_path))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ModelError, match=r"lack 9 tensors of the model, first 'model\.layers\.3\."):
        load(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot load the weights"):
        load(str(folder))


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), "fp32"), (float("inf"), "fp32"), (float("-inf"), "bf16"), (1e6, "fp16")]
)
def test_weights_that_are_no_numbers(value: float, dtype: str, tmp_path: Path) -> None:
    folder = Path(save_model("llama", tmp_path))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' holds NaN or infinite values in torch\."
    with pytest.raises(ModelError, match=message):
        load(str(folder), dtype=dtype, device="cpu")


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_weights_that_are_stored_in_float8(
    stored: torch.dtype, value: float, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As plain parameters beside their scales, as transformers reads such checkpoints on a GPU with `kernels`."""
    read = loader.read_module

    def read_quantised(*arguments: Any) -> Any:
        module = read(*arguments)
        up = module.model.layers[1].mlp.up_proj
        up.weight = torch.nn.Parameter(up.weight.to(stored), requires_grad=False)
        up.weight_scale_inv = torch.nn.Parameter(torch.full((1, 1), value), requires_grad=False)
        return module

    monkeypatch.setattr(loader, "read_module", read_quantised)
    if math.isfinite(value):
        load(str(llama), dtype="fp32", device="cpu", pack=False, self_test=False)
        return
    with pytest.raises(ModelError, match=r"up_proj\.weight_scale_inv' holds NaN or infinite values"):
        load(str(llama), dtype="fp32", device="cpu", pack=False, self_test=False)


@pytest.mark.parametrize("keep", [0, 5, 1000, 20_000])
def test_a_file_of_weights_that_ends_too_soon(keep: int, tmp_path: Path) -> None:
    folder = Path(save_model("llama", tmp_path))
    file = folder / "model.safetensors"
    assert file.stat().st_size > keep
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match="cannot load the weights: ") as caught:
        load(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


def test_a_file_of_weights_full_of_rubbish(tmp_path: Path) -> None:
    folder = Path(save_model("llama", tmp_path))
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    with pytest.raises(ModelError, match="cannot load the weights: "):
        load(str(folder), device="cpu")


def test_a_folder_that_may_not_be_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(ModelError, match=r"llama\d*: cannot be read: Permission denied"):
        load(str(llama))
    with pytest.raises(CheckError, match=r"--target .*llama\d*: cannot be read: Permission denied"):
        check_model(str(llama), "--target")


@pytest.mark.parametrize(
    ("option", "message"),
    [({"dtype": "int3"}, "dtype 'int3' is unknown"), ({"device": "abacus"}, "device 'abacus' cannot be used")],
)
def test_bad_options(option: dict[str, Any], message: str, llama: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load(str(llama), **option)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("bloom", "'bloom' cannot speculate: its layers must each call the registered attention once"),
        ("mamba", "'mamba' cannot speculate: it keeps a recurrent state, which cannot roll back"),
        ("bert", "'bert' cannot speculate: through the slot cache its logits differ"),
    ],
)
def test_unservable_families_are_refused_by_name(family: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load(save_model(family, tmp_path), device="cpu")


def without(argument: str) -> Any:
    def faulty(*args: Any, **kwargs: Any) -> Any:
        return attention.paged_attention(*args, **{**kwargs, argument: None})

    return faulty


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize(
    ("family", "argument"),
    [("mistral", "sliding_window"), ("gemma2", "softcap"), ("gpt_oss", "s_aux")],
)
def test_a_forgotten_argument_is_found(family: str, argument: str, dtype: str, tmp_path: Path) -> None:
    # A low cap, because random weights give scores that the usual cap of 50 leaves alone.
    changes = {"attn_logit_softcapping": 0.5, "sliding_window": 4096} if family == "gemma2" else {}
    folder = save_model(family, tmp_path, **changes)
    registry = attention.AttentionInterface()
    registry.register(attention.NAME, without(argument))
    try:
        with pytest.raises(ModelError, match=f"'{family}' cannot speculate: .* differ .*tolerance"):
            load(folder, dtype=dtype, device="cpu", by_rows=False)
    finally:
        registry.register(attention.NAME, attention.paged_attention)
    assert load(folder, dtype=dtype, device="cpu", by_rows=False).layers == 3


def test_a_wrong_mask_is_found(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query sees every pending node: right for a single token, wrong for chains and trees."""
    softmax = row_attention._softmax

    def seeing_all(products: torch.Tensor, scale: float, cap: float | None, mask: torch.Tensor, *sinks: Any) -> Any:
        return softmax(products, scale, cap, mask.amax(2, keepdim=True), *sinks)

    monkeypatch.setattr(row_attention, "_softmax", seeing_all)
    with pytest.raises(ModelError, match="'llama' cannot speculate"):
        load(str(llama), dtype="fp32", device="cpu", by_rows=False)


def test_windows_are_restored_after_the_test(tmp_path: Path) -> None:
    model = load(save_model("gpt_oss", tmp_path, sliding_window=77), dtype="fp32", device="cpu")
    assert model.config.sliding_window == 77
    windows = {getattr(module, "sliding_window", None) for module in model.module.modules()}
    assert windows == {77, None}


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({}, 256),
        ({"max_position_embeddings": None}, 1 << 20),
        ({"layer_types": ["full_attention", "chunked_attention"], "attention_chunk_size": 64}, 64),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 128}}, 128),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}, "original_max_position_embeddings": 99},
            99,
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "original_max_position_embeddings": 99}}, 256),
        ({"rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 99}}, 256),
    ],
)
def test_context_ends_where_packing_would_change_the_result(fields: dict[str, Any], context: int) -> None:
    class Config:
        max_position_embeddings = 256

    config = Config()
    vars(config).update(fields)
    assert loader.context_of(config) == context


def test_a_gpu_does_without_attention_by_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("torch.backends.cuda.enable_cudnn_sdp", asked.append)
    monkeypatch.setattr(loader, "_check_numbers", Mock(side_effect=ModelError("no further without a GPU")))
    for device in ("cpu", "cuda"):
        with pytest.raises(ModelError, match="no further"):
            loader.from_module("none", None, {}, torch.bfloat16, torch.device(device), loader.Treatment())
        assert asked == [False] * (device == "cuda")


def test_threads(llama: Path) -> None:
    """Torch has those of the worker, once a model is computed with torch; until then one."""
    before, known = torch.get_num_threads(), replace(COUNTS)
    COUNTS.of_torch = False
    try:
        rows = load(str(llama), threads=2, self_test=False).attention
        in_cpp = isinstance(rows, CpuRows) and rows.all_layers
        assert torch.get_num_threads() == (1 if in_cpp else 2)
        load(str(llama), threads=2, self_test=False, by_rows=False)
        assert torch.get_num_threads() == 2
        load(str(llama), threads=2, self_test=False)
        assert torch.get_num_threads() == 2
        load(str(llama), self_test=False)
        assert torch.get_num_threads() == 1
        with pytest.raises(ValueError, match="at least 1"):
            load(str(llama), threads=0)
    finally:
        torch.set_num_threads(before)
        COUNTS.of_torch, COUNTS.few, COUNTS.most = known.of_torch, known.few, known.most


def test_weights_are_counted_now_and_then() -> None:
    heard: list[Loading] = []
    assert list(checkpoint._counted(range(290), heard.append)) == list(range(290))
    assert heard[0] == Loading("loading weights: 0 of 290 tensors", 0.0)
    assert heard[10].doing == "loading weights: 145 of 290 tensors"
    assert len(heard) == 20


def test_a_rank_falls_back_with_another_that_computes_wrong(tmp_path: Path) -> None:
    """Though its own test is passed; and with it when nothing is left."""
    model = replace(load_tiny("llama", tmp_path), attention=PlainRows(2))
    test: Any = Mock(check=lambda model: 0.0)
    said: list[bool] = []
    told: list[str] = []

    def agreed(so: bool) -> bool:
        said.append(so)
        return len(said) > 1

    fallen = loader._tested(model, test, told.append, agreed)
    assert type(fallen.attention) is RowAttention
    assert said == [True, True] and len(told) == 2
    with pytest.raises(CannotSpeculate, match="another rank computes it wrong"):
        loader._tested(fallen, test, told.append, lambda so: False)


def test_a_rank_that_does_not_answer_is_waited_for_as_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not as long as all may load. Past that the leader knows by the cause that it is late."""
    model, patience = load_tiny("llama", tmp_path), timedelta(seconds=1)
    silent = Mock(side_effect=[1, RuntimeError("timed out")])
    group: Any = SimpleNamespace(patience=patience, meet=Mock(), minimum=silent)
    group.all_agree = partial(Group.all_agree, group)
    monkeypatch.setattr(loader, "use_slices", Mock())
    test: Any = Mock(check=lambda model: 0.0)
    with pytest.raises(ModelError, match="a rank does not answer in its self-test") as caught:
        loader._for_speculation(model, test, Mock(), loader.Treatment(group=group))
    assert isinstance(caught.value.__cause__, RuntimeError)
    silent.assert_called_with(1, patience)


@pytest.mark.parametrize(
    ("cause", "told"), [(UnsupportedAttention("sparse"), True), (torch.OutOfMemoryError("out of memory"), False)]
)
def test_one_rank_is_advised_only_where_it_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: Exception, told: bool
) -> None:
    llama = load_tiny("llama", tmp_path)

    def refused(*_: object) -> Model:
        raise CannotSpeculate(llama, str(cause)) from cause

    monkeypatch.setattr(loader, "_for_speculation", refused)
    how = loader.Treatment(group=Mock(), self_test=False)
    with pytest.raises(ModelError, match=str(cause)) as caught:
        loader.from_module(llama.name, llama.module, {}, llama.dtype, llama.device, how)
    assert ("tensor_parallel_size 1" in str(caught.value)) == told
