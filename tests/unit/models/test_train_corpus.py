"""The held-out split is stable; the bundled tokenizer is lossless; training resumes; the card follows its figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

import models
from alignment.encoding import Batches
from alignment.losses import next_token_loss
from alignment.training import Trainer, TrainingPlan
from models.card import write_card
from models.corpus import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    SPECIAL_TOKENS,
    SourceFile,
    encode_files,
    held_out_prompts,
    is_held_out,
    is_wanted,
    read_prompts,
    read_sources,
    split_sources,
    train_tokenizer,
    write_prompts,
)
from models.pair import ModelShape, build, load, load_tokenizer, publish
from router.text.chat_template import ChatTemplate
from router.text.tool_calls import HermesParser, ToolCall, ToolForm

MODELS = Path(models.__file__).parent
TEXTS = [
    "",
    " ",
    "def f(x):\n    return x\n",
    "  leading and trailing  \n\n\n",
    "tabs\tand\r\nwindows line ends",
    "Zoë naïve café 日本語 العربية 🙂👩‍👩‍👧 \u200b\ufeff",
    "don 't clean , up ! this",
    "\x00\x01\x7f control",
]


@pytest.fixture(scope="module", params=["target", "draft"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(MODELS / request.param)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def library() -> list[SourceFile]:
    return list(read_sources())


def test_the_split_covers_everything_once(library: list[SourceFile]) -> None:
    split = split_sources(library)
    train, held_out = ({file.name for file in part} for part in (split.train, split.held_out))
    assert not train & held_out
    assert train | held_out == {file.name for file in library}
    assert 0.02 < len(held_out) / len(library) < 0.10


def test_the_split_depends_on_nothing_but_the_name(library: list[SourceFile]) -> None:
    emptied = [SourceFile(file.name, "") for file in reversed(library)]
    names = {file.name for file in split_sources(library).held_out}
    assert names == {file.name for file in split_sources(emptied).held_out}
    verdicts = [is_held_out(name) for name in ("statistics.py", "json/decoder.py")]
    assert verdicts == [True, False], "the rule itself has changed"


def test_reading_twice_gives_the_same_corpus(library: list[SourceFile]) -> None:
    assert library == list(read_sources())
    assert [file.name for file in library] == sorted(file.name for file in library)


@pytest.mark.parametrize("path", ["site-packages/x.py", "test/test_os.py", "lib2to3/tests/data/bom.py"])
def test_noise_is_left_out(path: str) -> None:
    assert not is_wanted(Path(path))


def test_unreadable_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_bytes(b"x = 1\r\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").write_bytes(b"")
    assert list(read_sources(tmp_path)) == [SourceFile("good.py", "x = 1\n")]


@pytest.mark.parametrize("text", TEXTS)
def test_bundled_tokenizer_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_bundled_tokenizer_round_trip_on_random_text(tokenizer: PreTrainedTokenizerFast) -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        codes = generator.integers(1, 0x2FFFF, size=int(generator.integers(1, 40)))
        text = "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_bundled_tokenizer_adds_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer("").input_ids == []
    assert tokenizer("x", add_special_tokens=True).input_ids == tokenizer("x", add_special_tokens=False).input_ids
    assert tokenizer.bos_token == tokenizer.eos_token == END_OF_TEXT
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    for token in SPECIAL_TOKENS:
        assert len(tokenizer(token).input_ids) == 1


def test_both_folders_hold_the_same_tokenizer() -> None:
    first, second = ((MODELS / name / "tokenizer.json").read_bytes() for name in ("target", "draft"))
    assert first == second


def test_a_chat_reads_like_code(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add two\nnumbers."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "# Be brief.\n# Add two\n# numbers.\n\n"


@pytest.mark.parametrize("name", ["target", "draft"])
def test_tools_are_offered_and_called_as_hermes_models_do(name: str) -> None:
    written = (MODELS / name / "chat_template.jinja").read_text(encoding="utf-8")
    assert written == CHAT_TEMPLATE
    template = ChatTemplate(written, {})
    assert template.tool_form is ToolForm.HERMES
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": [1, "é"]}}}
    messages = [
        {"role": "user", "content": "Add 1."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    text = template.render(messages, [{"type": "function", "function": {"name": "add"}}])
    offered, *rest = text.split("# Add 1.\n")
    assert '# {"name": "add"}\n' in offered and all(line.startswith("# ") for line in offered.splitlines())
    assert rest == ['<tool_call>\n{"name": "add", "arguments": {"a": [1, "é"]}}\n</tool_call>\n# 2\n\n']
    assert HermesParser().push(rest[0]).calls == [ToolCall("add", '{"a": [1, "é"]}')]
    plain = template.render([*messages[:1], {"role": "assistant", "content": "a = 1"}])
    assert plain == "# Add 1.\na = 1\n\n\n"


def test_prompts_are_held_out_and_short(tokenizer: PreTrainedTokenizerFast, library: list[SourceFile]) -> None:
    prompts = read_prompts(MODELS / "prompts.jsonl")
    assert len(prompts) == len(set(prompts)) == 40
    assert all(15 <= len(tokenizer(prompt).input_ids) <= 60 for prompt in prompts)


def test_prompts_come_from_the_given_files(tmp_path: Path) -> None:
    text = "".join(f"def function_{i}(argument):\n    return argument + {i}\n\n\n" for i in range(60))
    files = [SourceFile("a.py", text)]
    tokenizer = train_tokenizer(files, 300, 64)
    prompts = held_out_prompts(tokenizer, files, 5, seed=1)
    assert prompts == held_out_prompts(tokenizer, files, 5, seed=1)
    assert len(prompts) == 5
    assert all(prompt in text for prompt in prompts)
    write_prompts(tmp_path / "prompts.jsonl", prompts)
    assert read_prompts(tmp_path / "prompts.jsonl") == prompts


def test_files_are_separated_by_end_of_text() -> None:
    files = [SourceFile("a.py", "a = 1\n"), SourceFile("b.py", "b = 2\n")]
    tokenizer = train_tokenizer(files, 300, 64)
    assert tokenizer.decode(encode_files(tokenizer, files)) == f"{END_OF_TEXT}a = 1\n{END_OF_TEXT}b = 2\n{END_OF_TEXT}"


def test_batches_are_shifted_windows_and_repeatable() -> None:
    ids = np.arange(1000, dtype=np.uint16)
    batch = Batches(ids, seed=2).at(5, sequences=3, length=10)
    assert batch.shape == (3, 11)
    assert torch.equal(batch[:, 1:], batch[:, :-1] + 1)
    assert torch.equal(batch, Batches(ids, seed=2).at(5, sequences=3, length=10))


def test_an_epoch_visits_no_window_twice() -> None:
    batches = Batches(np.arange(1000, dtype=np.uint16), seed=2)
    per_epoch = ((1000 - 1) // 10 - 1) // 3
    starts = torch.cat([batches.at(step, sequences=3, length=10)[:, 0] for step in range(per_epoch)])
    assert len(set(starts.tolist())) == 3 * per_epoch


TINY = ModelShape(hidden_size=16, layers=1, heads=2, kv_heads=2, intermediate_size=24)
PLAN = TrainingPlan(
    steps=8,
    minutes=60.0,
    batch_tokens=32,
    sequence=8,
    long_sequence=16,
    muon_rate=1e-2,
    adam_rate=1e-2,
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    warmup_steps=2,
)


def trainer(checkpoint: Path) -> Trainer[LlamaForCausalLM]:
    return Trainer(build(TINY, 16, end_of_text=0, seed=1), PLAN, checkpoint)


def test_positions_are_told_apart_as_precisely_as_in_serving(tmp_path: Path) -> None:
    expected = build(TINY, 16, end_of_text=0, seed=1).model.rotary_emb.inv_freq
    trained = trainer(tmp_path / "checkpoint.pt").model
    publish(build(TINY, 16, end_of_text=0, seed=1), load_tokenizer(MODELS / "draft"), tmp_path / "model")
    for model in (trained, load(tmp_path / "model", torch.bfloat16)):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert torch.equal(model.model.rotary_emb.inv_freq, expected)


def test_interrupted_training_ends_where_uninterrupted_training_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignment.training.CHECKPOINT_SECONDS", 0.0)
    batches = Batches(np.arange(400, dtype=np.uint16), seed=0)
    whole = trainer(tmp_path / "whole.pt").run(batches, next_token_loss, "whole")

    steps = iter(range(3))

    def interrupted(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return next_token_loss(logits, tokens)

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "parts.pt").run(batches, interrupted, "first part")
    second = trainer(tmp_path / "parts.pt")
    resumed = second.run(batches, next_token_loss, "second part")
    assert second.progress.step == PLAN.steps
    assert second.progress.tokens == PLAN.steps * PLAN.batch_tokens
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_publishing_replaces_the_old_model_whole(tmp_path: Path) -> None:
    bundled = load_tokenizer(MODELS / "draft")
    for seed in (1, 2):
        model = build(TINY, 16, end_of_text=0, seed=seed)
        publish(model, bundled, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    loaded = load(tmp_path / "model", torch.bfloat16)
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight.bfloat16())
    assert torch.equal(loaded.lm_head.weight, model.model.embed_tokens.weight.bfloat16())
    assert load_tokenizer(tmp_path / "model").get_vocab() == bundled.get_vocab()


def test_the_card_is_what_its_figures_say(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        shutil.copy(MODELS / name / "config.json", tmp_path / name)
    shutil.copy(MODELS / "card.json", tmp_path)
    write_card(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert card == (MODELS / "README.md").read_text(encoding="utf-8"), "run `python -m models.train card`"
    nats = json.loads((MODELS / "card.json").read_text(encoding="utf-8"))["held_out"]["target"]["nats"]
    assert f"{nats:.3f}" in card
