"""A worker on two ranks says what it says on one, and a group that loses a rank ends."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from datetime import timedelta
from random import Random

import pytest
import torch

from cluster.config.pools import TargetConfig
from cluster.doctor import machine
from draft_service.lookahead import Lookahead
from engine import leader
from engine.build import build, welcome
from engine.host.memory import GIB
from engine.interface import Chunk
from engine.model import ModelError
from engine.parallel import group
from engine.parallel.group import RankError
from engine.settings import EngineSettings
from engine.step import Engine
from speculation.messages import Limits, Open, Proposal, Sampling, SessionId, Source, Speculation, Verification
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.ranks import Forked, Watched, needs_no_gpu, on_ranks
from tests.stack import MODELS, held_out_prompts, needs_invariant_bf16
from tests.thorough import mostly_thorough
from tests.unit.engine.engine_models import save_model

pytestmark = needs_no_gpu


@needs_invariant_bf16
@pytest.mark.parametrize("ranks", [2, 4])
def test_bfloat16_logits_do_not_depend_on_the_batch(ranks, tmp_path):
    """Heads of 64 numbers, since torch leaves the products of smaller ones, one head to a rank, to another kernel."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    folder = save_model("llama", tmp_path, intermediate_size=192, **heads)
    settings = EngineSettings(folder, dtype="bfloat16", device="cpu", cache_tokens=256)
    rng = Random(1)
    text = [rng.randrange(3, 250) for _ in range(80)]
    with on_ranks(settings, count=ranks) as engine:

        def logits(sizes: list[int]) -> torch.Tensor:
            sequence, rows = engine.cache.sequence(), []
            for size in sizes:
                part = text[sequence.length :][:size]
                rows.append(engine.run([Chunk(sequence, part, rows=range(size))]))
                sequence.advance(range(size))
            sequence.free()
            return torch.cat(rows)

        one_by_one = logits([1] * len(text))
        assert torch.equal(logits([len(text)]), one_by_one)
        assert torch.equal(logits([40, *[9, 3, 1, 8, 11, 8]]), one_by_one)


LINK = "router"
BOTH = [Sampling(temperature=0.0), Sampling(temperature=0.8, seed=21)]


def texts(target: Engine, draft: Engine | None) -> dict[int, list[int]]:
    """What six sessions say, greedy and sampled, in a cache that does not hold them all at once."""
    machine = VerifyLoop(target, welcome(EngineSettings("t"), target.model, "target"), TargetLimits(adaptive=False))
    drafter = draft and Lookahead(draft, welcome(EngineSettings("d"), draft.model, "draft"))
    sources = frozenset({Source.DRAFT}) if drafter else frozenset()
    for number in range(6):
        prompt = held_out_prompts()[number][:40]
        speculation = Speculation(enabled=drafter is not None, sources=sources)
        opening = Open(
            SessionId(number), 1, prompt, BOTH[number % 2], Limits(len(prompt) + 80), speculation=speculation
        )
        machine.receive(LINK, opening)
        if drafter:
            drafter.receive(LINK, opening)
    said: dict[int, list[int]] = {}
    accepted = offered = 0
    while (sent := machine.step()) is not None:
        for _, message in sent:
            assert isinstance(message, Verification)
            said.setdefault(message.session, []).extend(message.tokens)
            accepted, offered = accepted + message.accepted, offered + message.offered
            if drafter:
                drafter.receive(LINK, message)
        for _, message in [found for _ in range(3) for found in (drafter.step() or [])] if drafter else []:
            if isinstance(message, Proposal):
                machine.receive(LINK, message)
    assert machine.counters.preempted > 0
    if drafter:
        assert 0 < accepted < offered
    target.cache.validate()
    assert target.cache.free_tokens == target.cache.capacity
    return said


@pytest.mark.thorough
def test_two_ranks_say_what_one_says_with_branches_and_preemption():
    target = EngineSettings(str(MODELS / "target"), dtype="fp32", cache_tokens=320)
    one = build(target)
    draft = build(EngineSettings(str(MODELS / "draft"), dtype="fp32"), invariant=False)
    plain = texts(one, None)
    assert all(len(text) == 80 for text in plain.values())
    with on_ranks(target) as two:
        assert texts(two, None) == plain
        assert texts(two, draft) == plain


@pytest.mark.thorough
def test_a_drafter_on_two_ranks_drafts_what_it_drafts_on_one():
    target = build(EngineSettings(str(MODELS / "target"), dtype="fp32", cache_tokens=320))
    plain = texts(target, None)
    with on_ranks(EngineSettings(str(MODELS / "draft"), dtype="fp32")) as draft:
        assert texts(target, draft) == plain


@pytest.mark.parametrize(
    ("family", "changes", "ranks", "words"),
    [
        ("llama", {}, 4, "tensor_parallel_size 4 does not divide its 2 key/value heads; possible: 1, 2"),
        ("gemma4_text", {}, 2, "tensor_parallel_size 2 does not divide its 1 key/value heads; possible: 1"),
        ("llama", {"intermediate_size": 97}, 2, "does not divide its 97 inner units of a layer (intermediate_size);"),
        ("gpt2", {}, 2, "model type 'gpt2' cannot be split over ranks, transformers has no plan for it"),
        ("olmo_hybrid", {}, 2, "keeps a recurrent state; a target serves it on one rank, without speculation: use"),
    ],
)
def test_what_cannot_be_split_is_refused_before_a_rank_is_started(tmp_path, family, changes, ranks, words):
    folder = save_model(family, tmp_path, **changes)
    processes = Watched()
    with pytest.raises(ModelError) as caught:
        build(EngineSettings(folder, device="cpu", tensor_parallel_size=ranks), ranks=processes)
    assert words in str(caught.value)
    assert folder in str(caught.value)
    assert processes.pids == {}


def test_what_is_found_to_be_unable_to_speculate_on_ranks_is_refused_with_what_would_be_right(tmp_path):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    folder = save_model("minimax", tmp_path, head_dim=16, block_size=16, **experts)
    words = (
        r"layer 1 called it 0 times; a target serves it on one rank, without speculation: use tensor_parallel_size 1"
    )
    with pytest.raises(ModelError, match=words), on_ranks(EngineSettings(folder, dtype="fp32", device="cpu")):
        pass


@pytest.mark.parametrize("family", mostly_thorough(["olmo2", "phi3", "gpt_neox"], quick=["olmo2"]))
def test_the_doctor_knows_what_the_cache_of_a_rank_takes(tmp_path, family):
    folder = save_model(family, tmp_path, num_hidden_layers=2, num_key_value_heads=4)
    pool = TargetConfig(model=folder, tensor_parallel_size=2, cache_tokens=512, dtype="float32", device="cpu")
    expected = machine._memory(pool, machine.Devices(False, None, [], GIB))
    with on_ranks(EngineSettings(folder, dtype="fp32", device="cpu", cache_tokens=512)) as engine:
        engine.run([Chunk(engine.cache.sequence(), [5])])
        store = engine.cache.store
        held = sum(stored.nbytes for stored in (*store._keys, *store._values))
    assert expected is not None and expected[1] == held


@pytest.fixture
def tiny(tmp_path) -> EngineSettings:
    return EngineSettings(save_model("llama", tmp_path, num_hidden_layers=2), dtype="fp32", device="cpu")


def test_a_rank_that_never_joins_is_named(tiny):
    class Absent(Watched):
        def start(self, tasks) -> None:
            """Start nobody."""

    with pytest.raises(RankError) as caught, on_ranks(replace(tiny, join_timeout=0.001), Absent()):
        pass
    assert str(caught.value) == "not all 2 ranks joined within 0.001 s (join_timeout): rank 1 was not started"


def test_a_rank_that_dies_before_it_joins_is_named(tiny):
    class Struck(Watched):
        def start(self, tasks) -> None:
            super().start(tasks)
            os.kill(self.pids[1], signal.SIGKILL)

    with pytest.raises(RankError) as caught, on_ranks(tiny, Struck()):
        pass
    assert str(caught.value) == "rank 1 of 2: was killed by signal 9"


def test_a_model_that_only_another_rank_refuses_is_refused_with_its_reason(tiny, tmp_path):
    class Misled(Watched):
        def start(self, tasks) -> None:
            other = replace(tasks[0].settings, model=str(tmp_path / "none"))
            super().start([replace(tasks[0], settings=other)])

    with pytest.raises(ModelError, match=r"rank 1 of 2: .*none: no such folder"), on_ranks(tiny, Misled()):
        pass


def test_an_idle_worker_ends_when_a_rank_dies(tiny):
    ranks = Watched()
    with on_ranks(tiny, ranks) as engine:
        os.kill(ranks.pids[1], signal.SIGKILL)
        assert ranks.told.wait(60)
        assert ranks.reason == "rank 1 of 2: was killed by signal 9"
        with pytest.raises((RankError, RuntimeError)):
            engine.run([Chunk(engine.cache.sequence(), [5])])


def test_an_idle_worker_sees_whether_its_ranks_answer(tiny):
    ranks = Forked()
    with on_ranks(tiny, ranks) as engine:
        for _ in range(2):
            engine.check()
            engine.run([Chunk(engine.cache.sequence(), [5])])
        os.kill(ranks.pids[1], signal.SIGSTOP)
        assert engine._leader is not None and engine._leader._group is not None
        engine._leader._group.patience = timedelta(seconds=1)
        with pytest.raises(RankError, match=r"no answer within \d+ s from one of: rank 1 runs"):
            engine.check()
        with pytest.raises(RankError, match="out of step"):
            engine.check()


@pytest.mark.thorough
def test_a_rank_that_hangs_does_not_hang_the_worker_for_long(tiny, monkeypatch):
    monkeypatch.setattr(group, "COMPUTING", timedelta(seconds=10))  # they meet within it, too
    ranks = Forked()
    with on_ranks(tiny, ranks) as engine:
        os.kill(ranks.pids[1], signal.SIGSTOP)
        sequence = engine.cache.sequence()
        with pytest.raises(RankError, match=r"no answer within \d+ s from one of: rank 1 runs"):
            engine.run([Chunk(sequence, [5])])
        assert sequence.pending == 0
        with pytest.raises(RankError, match="out of step"):
            engine.run([Chunk(sequence, [5])])


@pytest.mark.thorough
def test_a_rank_that_hangs_while_it_loads_is_named(tiny, monkeypatch):
    ranks = Forked()
    assembled = leader.Leader._assembled

    def stopped(self) -> group.Group:
        met = assembled(self)
        os.kill(ranks.pids[1], signal.SIGSTOP)
        return met

    monkeypatch.setattr(leader.Leader, "_assembled", stopped)
    monkeypatch.setattr(leader, "TELLING_SECONDS", 0.1)
    with pytest.raises(RankError) as caught, on_ranks(replace(tiny, load_timeout=10.0), ranks):
        pass
    assert str(caught.value).startswith("not all 2 ranks have loaded within 10 s (load_timeout): rank 1 runs")


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_worker_whose_ranks_are_out_of_step_ends(tiny, monkeypatch, role):
    """So that it is started again; else it would refuse every request for ever."""
    monkeypatch.setattr(leader, "TELLING_SECONDS", 0.1)
    opened = [Open(SessionId(n), 1, (5, 6, n), Sampling(temperature=0.0), Limits(40)) for n in range(7, 10)]
    with on_ranks(tiny) as engine:
        machine = (VerifyLoop if role == "target" else Lookahead)(engine, welcome(tiny, engine.model, role))
        machine.receive(LINK, opened[0])
        machine.step()
        compute = engine.compute

        def fail_once(*inputs):
            monkeypatch.setattr(engine, "compute", compute)
            compute(*inputs)
            raise torch.OutOfMemoryError("planted")

        monkeypatch.setattr(engine, "compute", fail_once)
        for one in opened[1:]:
            machine.receive(LINK, one)
        with pytest.raises(RankError, match="out of step"):
            machine.step()


@pytest.mark.thorough
def test_a_rank_that_fails_ends_the_worker_with_its_last_words(tiny):
    ranks = Forked()
    with on_ranks(tiny, ranks) as engine:
        assert engine._leader is not None and engine._leader._group is not None
        engine._leader._group.tell(b"nonsense")
        assert ranks.told.wait(60)
        assert ranks.reason.startswith("rank 1 of 2: ")
        assert "UnpicklingError" in ranks.reason
