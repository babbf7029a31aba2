"""Every faster way to compute a step on CUDA equals the plain one, and waits for the device once a step.

Run with `make test ARGS=tests/gpu` on a machine that has a GPU; without the development environment, with
`python3 -m pytest --confcutdir=tests/gpu tests/gpu`, which needs torch, transformers, torchao, tokenizers and pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.attention.row_attention import RowAttention
from engine.attention.triton_rows import TritonRows, find_attention, trial_error
from engine.build import build
from engine.cache.kv_store import PAGE
from engine.cuda.graphs import CudaRecorder, Record
from engine.exactness import warm_up
from engine.interface import Chunk
from engine.levels.level_memory import LevelExpansion, TreePlace
from engine.loading.loader import load
from engine.model import Model
from engine.sampling.rejection import verify_chains
from engine.sampling.sampling import Draw, candidates, drawn, filtered_log_probs, sample
from engine.settings import EngineSettings
from engine.step import Engine
from speculation.acceptance import Chosen
from speculation.messages import EXACT, Sampling, Source
from speculation.verifying.calibration import Calibration
from tests.bundled import MODELS, held_out_prompts
from tests.by_rows import Twins, by_rows
from tests.unit.engine.engine_models import random_tokens, save_model

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: GPU equality is not checked here"
)

CUDA = torch.device("cuda")
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, seed=4),
    Sampling(temperature=1.0, top_p=0.999, seed=5),
]


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """With heads of 64, grouped; mistral slides."""
    changes = {"head_dim": 64, "max_position_embeddings": 4096}
    if request.param == "mistral":
        changes["sliding_window"] = 300
    folder = save_model(request.param, tmp_path_factory.mktemp(request.param), **changes)
    return load(folder, dtype="fp16", device="cuda", self_test=False, by_rows=False)


def engine_of(model: Model, record: Record | None = None) -> Engine:
    """By rows, computed or recorded."""
    heads = model.config.num_attention_heads // model.config.num_key_value_heads
    attention = TritonRows(model.context, heads, CUDA)
    return by_rows(model, 40 * PAGE * 4, attention, record=record)


def plain_engine_of(model: Model) -> Engine:
    """Sequence by sequence, with pages as large: what is cached is found again alike."""
    return by_rows(model, 40 * PAGE * 4, RowAttention(page=PAGE))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_close(found: torch.Tensor, expected: torch.Tensor, told: str) -> None:
    """In half precision, row by row."""
    spread_R = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    error = ((found - expected).norm(dim=-1) / spread_R).max()
    assert error < 0.03, f"{told}: off by {float(error):.2g}"


# -- attention by rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("heads_per_key", [1, 3, 4, 8])
@pytest.mark.parametrize("context", [400, 131_072])
def test_the_kernels_are_found_and_right(dtype: torch.dtype, heads_per_key: int, context: int) -> None:
    assert find_attention(context, heads_per_key, dtype, CUDA) is not None
    attention = TritonRows(context, heads_per_key, CUDA)
    assert trial_error(attention, heads_per_key, dtype, CUDA) < {torch.float32: 1e-4}.get(dtype, 0.03)


@pytest.mark.parametrize("recorded", [False, True], ids=["computed", "replayed"])
@pytest.mark.parametrize("seed", range(3))
def test_steps_by_rows(model: Model, recorded: bool, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Prompts, decoding, chains and trees, mixed; every one of them is replayed where any is."""
    engine = engine_of(model, CudaRecorder(CUDA) if recorded else None)
    warm_up(engine)
    twins = Twins(seed, engine, plain_engine_of(model), branches=0.3, prefix=700)
    for _ in range(4):
        twins.open()
    for step in range(30):
        found, expected = twins.step(max_tokens=300 if step < 6 else 7)
        assert_close(found, expected, f"seed {seed}, step {step}")
    assert not [record for record in caplog.records if record.levelname == "WARNING"], "recording failed"


@pytest.mark.parametrize("recorded", [False, True], ids=["computed", "replayed"])
def test_a_token_has_the_same_bits_however_it_is_computed(tmp_path: Path, recorded: bool) -> None:
    """Also with the recordings of every number of rows: none had to be given up."""
    folder = save_model("llama", tmp_path, head_dim=64, max_position_embeddings=4096)
    model = load(folder, dtype="bf16", device="cuda", self_test=False, by_rows=False)
    engine = engine_of(model, CudaRecorder(CUDA) if recorded else None)
    classes = engine.row_classes
    warm_up(engine)
    assert engine.exactness == EXACT
    assert engine.row_classes == classes


# -- sampling and waiting ----------------------------------------------------------------------------------------------


def clear_of_top_p(logits_NV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Which tokens top-p keeps or not whatever the rounding: a CPU sums probabilities up in double, CUDA in float."""
    if sampling.top_p == 1.0:
        return torch.ones_like(logits_NV, dtype=torch.bool)
    draws = [Draw(replace(sampling, top_p=1.0, min_p=0.0), position) for position in range(len(logits_NV))]
    sorted_NV, tokens_NV = filtered_log_probs(logits_NV.double(), draws).exp().sort(-1, descending=True)
    above_NV = sorted_NV.cumsum(-1) - sorted_NV
    return torch.empty_like(above_NV).scatter_(-1, tokens_NV, (above_NV - sampling.top_p).abs()) > 1e-5


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_draws_and_candidates_are_the_cpus(sampling: Sampling) -> None:
    logits_NV = torch.randn(48, 32_000, generator=torch.Generator().manual_seed(2)) * 3
    draws = [Draw(sampling, position) for position in range(48)]
    assert sample(logits_NV.cuda(), draws) == sample(logits_NV, draws)
    on_cuda, on_cpu = candidates(logits_NV.cuda(), draws, 4), candidates(logits_NV, draws, 4)
    assert [[each.token for each in row] for row in on_cuda] == [[each.token for each in row] for row in on_cpu]
    kept = filtered_log_probs(logits_NV.cuda(), draws).cpu().isfinite()
    clear = clear_of_top_p(logits_NV, sampling)
    assert clear.float().mean() > 0.99
    assert torch.equal(kept[clear], filtered_log_probs(logits_NV, draws).isfinite()[clear])


def test_verdicts_of_the_rejection_rule_are_the_cpus() -> None:
    logits_RV = torch.randn(40, 500, generator=torch.Generator().manual_seed(3))
    draws = [Draw(Sampling(temperature=1.0, seed=6), position) for position in range(40)]
    chains = [
        [Chosen(token) for token in logits_RV[start : start + 4].argmax(-1).tolist()] for start in range(0, 40, 5)
    ]
    assert verify_chains(logits_RV.cuda(), draws, chains) == verify_chains(logits_RV, draws, chains)


@pytest.mark.parametrize("recorded", [False, True], ids=["computed", "replayed"])
def test_a_step_waits_for_the_device_only_to_fetch_its_tokens(model: Model, recorded: bool) -> None:
    engine = engine_of(model, CudaRecorder(CUDA) if recorded else None)
    sequences = [engine.cache.sequence() for _ in range(4)]

    def step(counts: list[int], branches: bool = False) -> None:
        parents = [-1, 0, 0] if branches else None
        chunks = [
            Chunk(sequence, random_tokens(count, count), parents if count == 3 else None, range(count))
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        draws = [Draw(SAMPLINGS[i % len(SAMPLINGS)], i) for i in range(sum(counts))]
        drawn(engine.run(chunks), draws)

    shapes = [([300, 2, 40, 7], False), ([1, 1, 1, 1], False), ([5, 1, 4, 6], False), ([3, 1, 3, 2], True)]
    for counts, branches in shapes:  # what is set up once may wait
        step(counts, branches)
        for sequence in sequences:
            sequence.rollback()
    for counts, branches in shapes:
        with no_waiting():
            step(counts, branches)
        for sequence in sequences:
            sequence.advance(range(min(2, sequence.pending)) if not branches else [0])
            sequence.rollback()


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_draft_levels_of_one_launch(model: Model, sampling: Sampling) -> None:
    """Recorded, and asked for without waiting: each place that was expanded draws what one step says of all of them."""
    engine, count = engine_of(model, CudaRecorder(CUDA)), 8
    levels = engine.levels(4, 3)
    assert levels is not None, "they were not recorded; the log says why"
    text, odds = random_tokens(PAGE + 7, 1), Calibration()
    sequence = engine.cache.sequence()
    engine.run([Chunk(sequence, text[:-1])])
    sequence.advance(range(len(text) - 1))
    logits_1V = engine.run([Chunk(sequence, text[-1:], rows=[0])])
    growth = LevelExpansion(
        sampling=sampling,
        stops=(),
        position=len(text),
        max_end=len(text) + count,
        min_weight=0.0,
        width=4,
        children=3,
        factors=odds.factors(Source.DRAFT),
        blocks=sequence.blocks,
        rows=[0],
        places=[TreePlace(len(text), *sequence.lineage(0))],
        weights=[1.0],
        leaves=(),
        slots=sequence.append([0] * 4 * (count - 1)),
    )
    with no_waiting():
        found = levels.launch(logits_1V, [growth], odds.table(Source.DRAFT), count)
    (expanded,) = levels.read(found)
    sequence.rollback()
    node_of, tokens, parents, ends = {(0, 0): 0}, text[-1:], [-1], [len(text)]
    for number, level in enumerate(expanded[1:], start=1):
        for place, one in enumerate(level):
            if one is not None:
                assert one.above is not None
                node_of[number, place] = len(tokens)
                parents.append(node_of[one.above])
                ends.append(ends[parents[-1]] + 1)
                tokens.append(one.token)
    assert len(tokens) == 1 + 3 + 4 * (count - 2)
    logits_RV = engine.run([Chunk(sequence, tokens, parents, range(len(tokens)))])
    expected = candidates(logits_RV, [Draw(sampling, end) for end in ends], 3)
    for (number, place), node in node_of.items():
        reached = expanded[number][place]
        assert reached is not None
        draws = reached.draws
        assert [token for token, _ in draws] == [each.token for each in expected[node]]
        assert [confidence for _, confidence in draws] == pytest.approx(
            [each.confidence for each in expected[node]], rel=2e-2
        )


def test_draws_recorded_with_a_step_are_those_made_behind_it(model: Model) -> None:
    """Greedy and at temperatures, also side by side; and nothing waits before they are fetched."""
    engine = engine_of(model, CudaRecorder(CUDA))
    sequence = engine.cache.sequence()
    for samplings in (SAMPLINGS[:1], SAMPLINGS[1:2], SAMPLINGS[:2]):
        for _ in range(3):  # computed first, then replayed
            draws = [Draw(samplings[i % len(samplings)], i) for i in range(12)]
            chunk = Chunk(sequence, random_tokens(12, 12), rows=range(12), draws=draws)
            logits_RV = engine.run([chunk])
            assert engine.drawn is not None
            assert engine.drawn.tolist() == [[token, 1] for token in sample(logits_RV.float(), draws)]
            sequence.rollback()
        with no_waiting():
            engine.run([chunk])
        sequence.rollback()


def test_no_waiting_would_be_noticed() -> None:
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        torch.ones(3, device=CUDA).tolist()


# -- from the settings on ----------------------------------------------------------------------------------------------


def test_a_built_engine_says_what_a_plain_one_says() -> None:
    settings = EngineSettings(str(MODELS / "target"), dtype="bfloat16", device="cuda", cache_tokens=8192)
    fast, plain = build(settings), build(replace(settings, plain_cuda=True))
    assert type(plain.model.attention) is RowAttention and isinstance(fast.model.attention, TritonRows)
    agreed = total = 0
    for prompt in held_out_prompts()[:10]:
        found, expected = (
            engine.run([Chunk(engine.cache.sequence(), prompt, rows=range(len(prompt)))]) for engine in (fast, plain)
        )
        agreed += int((found.argmax(-1) == expected.argmax(-1)).sum())
        total += len(prompt)
    assert agreed / total > 0.98
