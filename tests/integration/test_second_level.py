"""Workers whose drafts are guessed say what the target says alone, and bad assistants are refused in one line."""

from contextlib import asynccontextmanager

import pytest

from cluster.cli import main
from cluster.config.config import Override, load
from cluster.config.serving import draft_settings
from draft_service.service import DraftSettings, start_draft
from engine.model import ModelError
from engine.settings import EngineSettings
from speculation.drafting.guesses import Forward
from speculation.messages import Rule, Sampling, Schedule, Source, Speculation
from speculation.verifying.budget import StepCost
from tests.bundled import MODELS, with_other_vocabulary
from tests.stack import decode, dispatcher, held_out_prompts, target_worker
from transport.worker import Door

TOKENS = 16
DRAFTS = frozenset({Source.DRAFT})
GREEDY, COUPLED = Sampling(temperature=0.0), Sampling(temperature=0.8, seed=7)
REQUESTS = [
    (GREEDY, Speculation(sources=DRAFTS)),
    (COUPLED, Speculation()),
    (GREEDY, Speculation(sources=DRAFTS, schedule=Schedule.SEQUENTIAL, max_depth=6)),
    (GREEDY, Speculation(sources=DRAFTS, rule=Rule.REJECTION)),
]
SMALL = EngineSettings(str(MODELS / "draft"), dtype="float32")


@asynccontextmanager
async def drafting(settings: DraftSettings):
    worker = await start_draft(settings, await Door.open("draft", "127.0.0.1:0"))
    try:
        yield worker
    finally:
        await worker.stop()


@pytest.mark.thorough
async def test_the_text_is_the_targets_own_whatever_is_guessed(slow_target, monkeypatch):
    """The bundled target, which drafts well for its slower self, with all guesses that can be had."""
    monkeypatch.setattr(StepCost, "__call__", lambda self, tokens, **_: 1.0)
    monkeypatch.setattr(Forward, "pays", lambda *_: True)
    engine = EngineSettings(str(MODELS / "target"), dtype="float32")
    repeating = held_out_prompts()[3] * 2
    async with target_worker(model=slow_target) as target:
        async with dispatcher([target.worker.address]) as serving:
            plain = [await decode(serving, repeating, TOKENS, sampling) for sampling, _ in REQUESTS]
        async with drafting(DraftSettings(engine, lookup=True, assistant=SMALL.model)) as draft:
            async with dispatcher([target.worker.address], [draft.address]) as serving:
                drafted = [
                    await decode(serving, repeating, TOKENS, sampling, speculation=speculation)
                    for sampling, speculation in REQUESTS
                ]
            counters = draft._machine.load().counters
    assert [result.tokens for result in drafted] == [result.tokens for result in plain]
    assert sum(result.accepted for result in drafted) > 0
    assert counters["guessed"] >= counters["followed"] > 0


@pytest.mark.parametrize(("given", "looks_up"), [((), True), (("none",), False), (("lookup",), True)])
def test_settings_reach_the_worker(given, looks_up):
    chosen = [Override("draft.second_level", text, "--second-level") for text in given]
    settings = draft_settings(load(None, [*chosen, Override("draft.assistant", "Org/Tiny", "--assistant")]))
    assert (settings.lookup, settings.assistant) == (looks_up, "Org/Tiny")


@pytest.fixture
def other_vocabulary(tmp_path):
    return with_other_vocabulary(tmp_path / "other")


async def test_a_loaded_assistant_with_another_tokenizer_is_refused(other_vocabulary):
    words = rf"^--assistant {other_vocabulary}: its tokenizer \(4000 tokens\) is not that of the draft model .*$"
    with pytest.raises(ModelError, match=words) as refused:
        await start_draft(
            DraftSettings(SMALL, assistant=str(other_vocabulary)), await Door.open("draft", "127.0.0.1:0")
        )
    assert "\n" not in str(refused.value)


def test_an_assistant_with_another_tokenizer_is_refused_before_anything_is_loaded(other_vocabulary, capsys):
    assert main(["worker", "draft", "--listen", "127.0.0.1:0", "--assistant", str(other_vocabulary)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"paceline: --assistant {other_vocabulary}: its vocabulary is not that of the draft model ")
    assert "2 ids mean something else" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--second-level", "deep"], "--second-level: draft.second_level must be one of lookup, none, got 'deep'"),
        (["--assistant", "/nowhere"], "--assistant /nowhere: no such folder"),
        (["--asistant", "x"], "did you mean --assistant?"),
        (["--set", "draft.assistant=./nowhere"], "--assistant ./nowhere: no such folder"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments, words, capsys):
    try:
        code = main(["worker", "draft", "--listen", "127.0.0.1:0", *arguments])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert (code, said.count("\n")) == (2, 1)
    assert words in said
