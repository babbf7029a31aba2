"""Every faster way to compute a step on CUDA equals the plain one, and waits for the device once a step.

Run with `make test ARGS=tests/gpu` on a machine that has a GPU; without the development environment, with
`python3 -m pytest --confcutdir=tests/gpu tests/gpu`, which needs torch, transformers, torchao, tokenizers and pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import pytest
import torch

from engine.build import EngineSettings, build
from engine.cuda.graphs import CudaRecorder, Graphs, Record
from engine.cuda.kernel import PagedKernel, find_kernel, plain_attention
from engine.cuda.pages import Chain, Pages
from engine.kv_cache import KVCache
from engine.kv_store import PAGE
from engine.loader import Model, load
from engine.rejection import verify_chains
from engine.sampling import Draw, candidates, drawn, filtered_log_probs, sample
from engine.step import Chunk, Engine
from speculation.acceptance import Chosen
from speculation.messages import Sampling
from tests.bundled import MODELS, held_out_prompts
from tests.paged import Twins, gathering_kernel
from tests.unit.engine_models import random_tokens, save_model

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


def torchs_kernel(dtype: torch.dtype) -> PagedKernel:
    kernel = find_kernel(dtype, CUDA)
    if kernel is None:
        pytest.skip(f"torch {torch.__version__} has no paged kernel that computes right here; the log says why")
    return kernel


@pytest.fixture(scope="module", params=["torch's", "gathering"])
def kernel(request: pytest.FixtureRequest) -> PagedKernel:
    """Torch's, and one of plain tensor operations, so that graphs are tested whatever torch has."""
    return torchs_kernel(torch.float16) if request.param == "torch's" else gathering_kernel(PAGE)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """With heads of 64, grouped; mistral slides."""
    changes = {"head_dim": 64, "max_position_embeddings": 4096}
    if request.param == "mistral":
        changes["sliding_window"] = 300
    folder = save_model(request.param, tmp_path_factory.mktemp(request.param), **changes)
    return load(folder, dtype="fp16", device="cuda", self_test=False, paged=False)


def engine_of(model: Model, record: Record | None = None) -> Engine:
    cache = KVCache(model.layers, 40 * PAGE, block=PAGE, dtype=model.dtype, device=model.device)
    return Engine(model, cache, record=record)


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


# -- attention over pages ----------------------------------------------------------------------------------------------


def random_chains(rng: Random, count: int, longest: int) -> list[Chain]:
    """Decodes, verifications and prefills over pages in any order."""
    chains = []
    for _ in range(count):
        keys = rng.choice([1, 2, PAGE - 1, PAGE, PAGE + 1, rng.randint(1, longest)])
        queries = min(keys, rng.choice([1, 1, 5, 16, 70, 300]))
        chains.append(Chain(queries, keys, rng.sample(range(64), -(-keys // PAGE))))
    return chains


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("heads", "group", "size"), [(2, 1, 64), (8, 4, 128), (1, 8, 80), (4, 2, 256)])
def test_torchs_kernel_attends_to_what_it_should(dtype, heads, group, size):
    kernel = torchs_kernel(dtype)
    for seed in range(12):
        torch.manual_seed(seed)
        rng = Random(seed)
        chains = random_chains(rng, rng.choice([1, 4, 9]), 5000)
        keys, values = (torch.randn(64 * PAGE, heads, size, device=CUDA, dtype=dtype) for _ in range(2))
        query = 3 * torch.randn(sum(c.queries for c in chains), heads * group, size, device=CUDA, dtype=dtype)
        window = rng.choice([None, 1, 100, 700])
        found = kernel(query, keys, values, Pages.of(chains, PAGE, CUDA), None, window)
        expected = plain_attention(query, keys, values, chains, PAGE, window)
        error = float((found.float() - expected).abs().max())
        assert error < 0.05, f"seed {seed}: off by {error:.2g}"


@pytest.mark.parametrize("queries", [1, 6])
def test_torchs_kernel_gives_a_query_the_same_bits_in_any_batch(queries):
    kernel = torchs_kernel(torch.bfloat16)
    torch.manual_seed(1)
    keys, values = (torch.randn(64 * PAGE, 2, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(queries, 8, 128, device=CUDA, dtype=torch.bfloat16)
    mine = Chain(queries, 3000, tuple(range(20, 32)))
    alone = kernel(query, keys, values, Pages.of([mine], PAGE, CUDA), None, None)
    for seed in range(5):
        others = random_chains(Random(seed), 7, 5000)
        rest = torch.randn(sum(c.queries for c in others), 8, 128, device=CUDA, dtype=torch.bfloat16)
        pages = Pages.of([mine, *others], PAGE, CUDA)
        together = kernel(torch.cat((query, rest)), keys, values, pages, None, None)
        assert torch.equal(together[:queries], alone), f"seed {seed}"


@pytest.mark.parametrize("seed", range(3))
def test_steps_over_pages(model, kernel, seed):
    paged = engine_of(replace(model, paged=kernel))
    twins = Twins(seed, paged, engine_of(model), branches=0.3, prefix=700)
    for _ in range(4):
        twins.open()
    for step in range(20):
        found, expected = twins.step(most=300 if step < 6 else 7)
        assert_close(found, expected, f"seed {seed}, step {step}")


# -- graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_replayed_steps(model, kernel, seed, monkeypatch, caplog):
    replayed = []
    run = Graphs.run

    def counting(self, *args):
        logits_TV = run(self, *args)
        replayed.append(logits_TV is not None)
        return logits_TV

    monkeypatch.setattr(Graphs, "run", counting)
    recording = engine_of(replace(model, paged=kernel), CudaRecorder(CUDA))
    recording.warm_up()
    twins = Twins(seed, recording, engine_of(model), branches=0.1, prefix=400)
    for _ in range(4):
        twins.open()
    for step in range(40):
        found, expected = twins.step(most=300 if step < 5 else 4)
        assert_close(found, expected, f"seed {seed}, step {step}")
    assert not caplog.records, "recording failed"
    assert sum(replayed) > 15, f"{sum(replayed)} of {len(replayed)} steps were replayed"


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
def test_draws_and_candidates_are_the_cpus(sampling):
    logits_NV = torch.randn(48, 32_000, generator=torch.Generator().manual_seed(2)) * 3
    draws = [Draw(sampling, position) for position in range(48)]
    assert sample(logits_NV.cuda(), draws) == sample(logits_NV, draws)
    on_cuda, on_cpu = candidates(logits_NV.cuda(), draws, 4), candidates(logits_NV, draws, 4)
    assert [[each.token for each in row] for row in on_cuda] == [[each.token for each in row] for row in on_cpu]
    kept = filtered_log_probs(logits_NV.cuda(), draws).cpu().isfinite()
    clear = clear_of_top_p(logits_NV, sampling)
    assert clear.float().mean() > 0.99
    assert torch.equal(kept[clear], filtered_log_probs(logits_NV, draws).isfinite()[clear])


def test_verdicts_of_the_rejection_rule_are_the_cpus():
    logits_RV = torch.randn(40, 500, generator=torch.Generator().manual_seed(3))
    draws = [Draw(Sampling(temperature=1.0, seed=6), position) for position in range(40)]
    chains = [
        [Chosen(token) for token in logits_RV[start : start + 4].argmax(-1).tolist()] for start in range(0, 40, 5)
    ]
    assert verify_chains(logits_RV.cuda(), draws, chains) == verify_chains(logits_RV, draws, chains)


@pytest.mark.parametrize("recorded", [False, True], ids=["computed", "replayed"])
def test_a_step_waits_for_the_device_only_to_fetch_its_tokens(model, kernel, recorded):
    engine = engine_of(replace(model, paged=kernel), CudaRecorder(CUDA) if recorded else None)
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


def test_no_waiting_would_be_noticed():
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        torch.ones(3, device=CUDA).tolist()


# -- from the settings on ----------------------------------------------------------------------------------------------


def test_a_built_engine_says_what_a_plain_one_says():
    settings = EngineSettings(str(MODELS / "target"), dtype="bfloat16", device="cuda", cache_tokens=8192)
    fast, plain = build(settings), build(replace(settings, plain_cuda=True))
    assert plain.model.paged is None
    if fast.model.paged is None:
        pytest.skip(f"torch {torch.__version__} has no paged kernel that computes right here; the log says why")
    agreed = total = 0
    for prompt in held_out_prompts()[:10]:
        found, expected = (
            engine.run([Chunk(engine.cache.sequence(), prompt, rows=range(len(prompt)))]) for engine in (fast, plain)
        )
        agreed += int((found.argmax(-1) == expected.argmax(-1)).sum())
        total += len(prompt)
    assert agreed / total > 0.98
