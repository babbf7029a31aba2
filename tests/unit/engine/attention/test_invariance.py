"""In bfloat16 on a CPU a token's logits have the same bits however it is batched: near ties cannot fall otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from engine.attention import row_attention
from engine.attention.row_attention import SEGMENT
from engine.build import build, build_alone
from engine.cache.kv_cache import CachedSequence, KVCache
from engine.cpu.library import find_library
from engine.cpu.rows import CpuRows
from engine.interface import Chunk
from engine.layers.linear import PackedLinear
from engine.loading.loader import load
from engine.settings import EngineSettings
from engine.step import Engine
from tests.stack import MODELS, forget_prefixes, held_out_prompts, needs_exact_bf16, needs_invariant_bf16
from tests.thorough import mostly_thorough
from tests.unit.engine.engine_models import load_tiny

LARGER: dict[str, Any] = {"head_dim": 32, "max_position_embeddings": 2048}
"""Tiny random models are made this much larger: smaller products torch leaves to another kernel than oneDNN's."""

WIDE = 40
"""Nodes of a tree that all hang from the text."""

CONTEXTS = (1, 15, 16, 17, 63, 64, 100, 190, 300, SEGMENT - 1, SEGMENT, SEGMENT + 1, 511, 530, 2 * SEGMENT - 2, 900)


@needs_invariant_bf16
@pytest.mark.parametrize("inputs", [64, 256, 704, 1024, 2816, 4096])
def test_a_row_of_a_linear_layer_does_not_depend_on_the_others(inputs: int) -> None:
    torch.manual_seed(inputs)
    layer = PackedLinear(torch.randn(512, inputs, dtype=torch.bfloat16), None)
    x_NI = torch.randn(200, inputs, dtype=torch.bfloat16)
    with torch.inference_mode():
        alone_NO = torch.cat([layer(x_NI[i : i + 1]) for i in range(len(x_NI))])
        for rows in (2, 3, 5, 9, 16, 32, 33, 70, 200):
            assert torch.equal(layer(x_NI[:rows]), alone_NO[:rows])


@needs_exact_bf16
@pytest.mark.parametrize("model", mostly_thorough(["target", "slow_target"], quick=["target"]))
def test_logits_do_not_depend_on_how_tokens_are_batched(model: str, request: pytest.FixtureRequest) -> None:
    folder = MODELS / "target" if model == "target" else request.getfixturevalue("slow_target")
    engine = build(EngineSettings(str(folder), dtype="bfloat16", cache_tokens=2048))
    prompt, *others = (list(tokens[:40]) for tokens in held_out_prompts()[:4])
    rng = Random(7)
    text = prompt + [rng.randrange(engine.model.vocabulary) for _ in range(90)]

    def logits(sizes: list[int], crowded: bool) -> torch.Tensor:
        """All rows of ``text``, fed in chunks of these sizes, junk rolled back in between, others in the batch."""
        sequence, rows = engine.cache.sequence(), []
        crowd = [engine.cache.sequence() for _ in others] if crowded else []
        for size in sizes:
            fed = text[sequence.length : sequence.length + size]
            chunks = [Chunk(sequence, fed, rows=range(len(fed)))]
            chunks += [Chunk(other, [rng.randrange(1000)]) for other in crowd]
            rows.append(engine.run(chunks)[: len(fed)])
            sequence.advance(range(len(fed)))
            for other in crowd:
                other.advance([0])
            engine.run([Chunk(sequence, [5, 6, 7])])
            sequence.rollback()
        for used in (sequence, *crowd):
            used.free()
        return torch.cat(rows)

    one_by_one = logits([1] * len(text), crowded=False)
    assert torch.equal(logits([len(text)], crowded=False), one_by_one)
    assert torch.equal(logits([40, *[9] * 10], crowded=False), one_by_one)
    assert torch.equal(logits([40, *[3, 1, 8, 5, 1] * 5], crowded=True), one_by_one)


@needs_invariant_bf16
def test_logits_of_a_long_text_do_not_depend_on_its_chunks(tmp_path: Path) -> None:
    """Over some 1000 keys oneDNN cuts a sum by its length; ours is cut by position."""
    engine = engine_of("llama", tmp_path)
    rng = Random(1)
    text = [rng.randrange(3, 250) for _ in range(1500)]

    def logits(sizes: Sequence[int]) -> torch.Tensor:
        sequence, rows = engine.cache.sequence(), []
        for size in sizes:
            rows.append(engine.run([Chunk(sequence, text[sequence.length :][:size], rows=range(size))]))
            sequence.advance(range(size))
        sequence.free()
        return torch.cat(rows)

    at_once = logits([1500])
    assert torch.equal(logits([300] * 5), at_once)
    assert torch.equal(logits([700, 640, *[9] * 10, *[1] * 70]), at_once)


@needs_invariant_bf16
@pytest.mark.parametrize(("shared", "taken"), [(15, 15), (100, 100), (130, 128)])
def test_logits_do_not_depend_on_whether_a_prefix_was_taken_over(target: Engine, shared: int, taken: int) -> None:
    """Whole blocks in place or with a copied part; computed in one piece, one by one, or from accepted branches."""
    rng = Random(shared)
    prompt, tail = (list(tokens) for tokens in (sum(held_out_prompts()[:4], ())[:130], held_out_prompts()[5][:40]))
    text = [*prompt[:shared], *tail]
    forget_prefixes(target.cache)
    first = target.cache.sequence(list(text))
    expected = target.run([Chunk(first, text, rows=range(shared, len(text)))])
    first.free()
    for sizes in ([200], [1] * 200, [rng.randint(1, 9) for _ in range(200)]):
        forget_prefixes(target.cache)
        donor = target.cache.sequence(prompt)
        for size in sizes:
            fed = prompt[donor.length : donor.length + size]
            # Behind a refused draft, so that what is committed has to be moved home.
            parents = [-1, -1, *range(1, len(fed))]
            target.run([Chunk(donor, [7, *fed], parents)])
            donor.advance(range(1, len(fed) + 1))
            if donor.length == len(prompt):
                break
        sequence = target.cache.sequence(text)
        assert sequence.reuse() == taken
        rows = target.run([Chunk(sequence, text[taken:], rows=range(shared - taken, len(text) - taken))])
        assert torch.equal(rows, expected)
        for each in (donor, sequence):
            each.free()


def engine_of(family: str, folder: Path, *, in_cpp: bool = False, **changes: Any) -> Engine:
    model = load_tiny(family, folder, dtype="bfloat16", by_rows=in_cpp, **{**LARGER, **changes})
    assert isinstance(model.attention, CpuRows) == in_cpp
    return Engine(model, KVCache(model.layers, 4096, dtype=model.dtype, device=model.device))


def random_tree(rng: Random, sequence: CachedSequence, nodes: int, vocabulary: int) -> Chunk:
    """A chain, something bushy, or (always with many nodes) a wide one."""
    back = rng.choice([1, 2, 4, nodes]) if nodes < WIDE else nodes
    parents = [rng.randint(max(-1, node - back), node - 1) for node in range(nodes)]
    return Chunk(sequence, [rng.randrange(3, vocabulary) for _ in parents], parents, range(nodes))


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def decoded_plainly(engine: Engine, tree: Chunk) -> torch.Tensor:
    """The rows of a tree, computed as plain decoding of every path does: a token, committed, the next token."""
    assert tree.parents is not None
    length = tree.sequence.length
    rows: dict[int, torch.Tensor] = {}
    for leaf in set(range(len(tree.tokens))) - set(tree.parents):
        for node in path_to(tree.parents, leaf):
            rows[node] = engine.run([Chunk(tree.sequence, [tree.tokens[node]], rows=[0])])[0]
            tree.sequence.advance([0])
        tree.sequence.truncate(length)
    return torch.stack([rows[node] for node in range(len(tree.tokens))])


def differing_rows(engine: Engine, seed: int, contexts: Sequence[int], sizes: Sequence[int], rounds: int = 2) -> int:
    """How many nodes of random trees, one per session in a step, differ in any bit from plain decoding.

    After each round a random path is committed, so that later prefixes lie in the cache in any order.
    """
    rng = Random(seed)
    vocabulary = engine.model.vocabulary
    sequences = [engine.cache.sequence() for _ in contexts]
    for sequence, length in zip(sequences, contexts, strict=True):
        engine.run([Chunk(sequence, [rng.randrange(3, vocabulary) for _ in range(length)])])
        sequence.advance(range(length))
    differing = 0
    for _ in range(rounds):
        trees = [random_tree(rng, sequence, rng.choice(sizes), vocabulary) for sequence in sequences]
        together = engine.run(trees)
        for tree in trees:
            tree.sequence.rollback()
        alone = torch.cat([decoded_plainly(engine, tree) for tree in trees])
        differing += int((together != alone).any(1).sum())
        engine.run(trees)
        for tree in trees:
            assert tree.parents is not None
            tree.sequence.advance(path_to(tree.parents, rng.randrange(len(tree.tokens))))
            tree.sequence.rollback()
    for sequence in sequences:
        sequence.free()
    engine.cache.validate()
    return differing


@pytest.fixture(scope="module")
def target() -> Engine:
    return build(EngineSettings(str(MODELS / "target"), dtype="bfloat16", cache_tokens=4096))


@pytest.fixture(scope="module")
def one_by_one() -> Engine:
    """The same model computed one operation at a time, as those are that the C++ does not know."""
    settings = EngineSettings(str(MODELS / "target"), dtype="bfloat16", cache_tokens=4096)
    return build_alone(settings, load(settings.model, dtype="bfloat16", device="cpu", by_rows=False))


@needs_invariant_bf16
def test_it_does_one_operation_at_a_time(one_by_one: Engine) -> None:
    contexts = Random(5).sample(CONTEXTS, 3)
    assert differing_rows(one_by_one, 5, contexts, sizes=[1, 4, 9, 14]) == 0


@needs_exact_bf16
@pytest.mark.parametrize("seed", range(4))
def test_a_node_of_a_tree_equals_plain_decoding_of_its_path(target: Engine, seed: int) -> None:
    contexts = Random(seed).sample(CONTEXTS, 3)
    assert differing_rows(target, seed, contexts, sizes=[1, 4, 9, 14]) == 0, f"seed {seed}, contexts {contexts}"


@needs_exact_bf16
def test_a_wide_tree_equals_plain_decoding(target: Engine) -> None:
    assert differing_rows(target, 9, [375, 381], sizes=[WIDE], rounds=1) == 0


needs_cpp = pytest.param(True, marks=pytest.mark.skipif(find_library() is None, reason="no C++ compiler"))

SPECIAL: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 16}),
    ("mistral", {}),
    ("gemma2", {"attn_logit_softcapping": 0.5}),
    ("gpt_oss", {}),
]


@pytest.mark.parametrize("in_cpp", [pytest.param(False, marks=needs_invariant_bf16), needs_cpp])
@pytest.mark.parametrize(("family", "changes"), SPECIAL)
def test_windows_caps_sinks_and_head_groups(
    family: str, changes: dict[str, Any], *, in_cpp: bool, tmp_path: Path
) -> None:
    engine = engine_of(family, tmp_path, in_cpp=in_cpp, **changes)
    for seed in range(2):
        assert differing_rows(engine, seed, [3, 40, 130, SEGMENT + 6], sizes=[1, 4, 9]) == 0, f"seed {seed}"


@needs_invariant_bf16
def test_the_comparison_finds_differences(one_by_one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where lone rows are multiplied by another kernel, the same comparison fails."""
    multiply = row_attention._product

    def product(rows_BLI: torch.Tensor, matrix_BIO: torch.Tensor) -> torch.Tensor:
        if rows_BLI.shape[1] > 2:
            return multiply(rows_BLI, matrix_BIO)
        half = rows_BLI.shape[2] // 2
        return multiply(rows_BLI[..., :half], matrix_BIO[:, :half]) + multiply(
            rows_BLI[..., half:], matrix_BIO[:, half:]
        )

    monkeypatch.setattr(row_attention, "_product", product)
    assert differing_rows(one_by_one, 0, [100, 300], sizes=[9, 14]) > 0


def test_only_bfloat16_on_a_cpu_promises_it(target: Engine, tmp_path: Path) -> None:
    assert target.invariant
    single = load_tiny("llama", tmp_path)
    assert not Engine(single, KVCache(1, 64, dtype=single.dtype, device=single.device)).invariant
