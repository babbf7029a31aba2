"""Attention by rows, of torch, in C++ and in Triton's interpreter, is what the plain computation says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from engine.attention import row_attention
from engine.attention import triton_rows as module
from engine.attention.row_attention import RowAttention, Scoring
from engine.attention.rows import Rows, empty_buffer, packed
from engine.attention.triton_rows import TritonRows, find_attention, split_starts, trial_error
from engine.cache.kv_cache import KVCache
from engine.cache.sequence_state import SequenceState
from engine.cpu.library import find_library
from engine.cpu.rows import CpuRows
from tests.by_rows import check_groups, plain_attention
from tests.compiled import assert_compiles

CPU = torch.device("cpu")
PAGE = 8
PAGES = 16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits so short that small tests have many; the interpreter takes milliseconds for each."""
    for name, value in {"BLOCK": 32, "SPLITS": ((16, 2),), "LONGER_SPLITS": 1}.items():
        monkeypatch.setattr(module, name, value)


def rows_of(chunks: list[tuple[SequenceState, int]], group: int, rows: int = 16) -> Rows:
    count = sum(tokens for _, tokens in chunks)
    (piece,) = packed([0] * count, [], chunks, group=group, max_rows=rows, pages=PAGES)
    buffer = empty_buffer(rows, PAGES, CPU)
    numbers = piece.host_buffer(rows, 0)
    buffer[: len(numbers)] = numbers
    found = Rows.within(buffer, rows)
    check_groups(found)
    return found


def chunks_of(cache: KVCache, seed: int) -> list[tuple[SequenceState, int]]:
    """A prompt's part, a token behind a longer text, and a tree whose nodes lie where refused branches left room."""
    rng = random.Random(seed)
    prompt, text, tree = cache.sequence(), cache.sequence(), cache.sequence()
    for sequence, length in ((prompt, 3), (text, rng.randint(33, 70)), (tree, rng.randint(14, 40))):
        sequence.append(range(-1, length - 1))
        sequence.advance(range(length))
    prompt.append(range(-1, 4))
    text.append([-1])
    tree.append([-1, -1, 1, 1, 3])
    tree.advance([1])
    tree.append([-1, 0, tree.pending])
    return [(prompt, 5), (text, 1), (tree, 3)]


def tensors(query_heads: int, key_heads: int, size: int, value_size: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(4)
    query = 4 * torch.randn(16, query_heads, size)
    return query, torch.randn(slots, key_heads, size), torch.randn(slots, key_heads, value_size)


def triton(heads_per_key: int) -> RowAttention:
    return TritonRows(PAGE * PAGES, heads_per_key, CPU, page=PAGE)


def cpp(heads_per_key: int) -> RowAttention:
    library = find_library()
    if library is None:
        pytest.skip("no C++ compiler")
    attention = CpuRows(library, heads_per_key)
    attention.page = PAGE
    return attention


@pytest.mark.parametrize("made", [triton, cpp, lambda _: RowAttention(page=PAGE)], ids=["triton", "cpp", "torch"])
@pytest.mark.parametrize(
    ("heads", "sizes", "how"),
    [
        ((2, 1), (32, 32), {}),
        ((3, 1), (24, 20), {"window": 5}),
        ((3, 1), (64, 32), {"window": 5}),
        ((2, 2), (32, 32), {"cap": 3.0, "scaling": 0.3}),
        ((4, 2), (32, 64), {"sinks": True, "window": 20}),
    ],
    ids=["grouped", "odd sizes and a window", "values of another size", "capped", "sinks"],
)
def test_each_computes_what_is_plain(
    made: Callable[[int], RowAttention],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    how: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_attention, "SEGMENT", 16)
    cache = KVCache(1, PAGE * 32, block=PAGE, dtype=torch.float32, device=CPU)
    attention, how = made(heads[0] // heads[1]), dict(how)
    chunks = chunks_of(cache, 1)
    rows = rows_of(chunks, attention.group, 16 if attention.replayed else sum(tokens for _, tokens in chunks))
    query, keys, values = tensors(*heads, *sizes, cache.capacity)
    query = query[: len(rows)]
    if how.pop("sinks", False):
        how["sinks_Q"] = torch.randn(heads[0])
    found = attention(query, keys, values, attention.plan(rows), Scoring(**how))
    expected = plain_attention(query, keys, values, rows, page=PAGE, **how)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert not found[rows.keys_T == 0].any(), "rows that see nothing"


def test_what_is_not_ones_own_may_be_no_number() -> None:
    """Others' keys and values, and what lies behind the last token, do not count, not even as NaN."""
    cache = KVCache(1, PAGE * 32, block=PAGE, dtype=torch.float32, device=CPU)
    attention = TritonRows(PAGE * PAGES, 2, CPU, page=PAGE)
    (chunk, *_) = chunks = chunks_of(cache, 2)
    rows = rows_of(chunks, attention.group)
    query, keys, values = tensors(2, 1, 16, 16, cache.capacity)
    expected = attention(query, keys, values, attention.plan(rows))[:5]
    own = {chunk[0].home(position) for position in range(8)}
    broken = [slot for slot in range(cache.capacity) if slot not in own]
    keys[broken], values[broken] = float("nan"), float("nan")
    assert torch.equal(attention(query, keys, values, attention.plan(rows))[:5], expected)


def test_a_row_has_the_same_bits_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in a chain, as a branch of a tree, and beside others."""
    monkeypatch.setattr(numpy, "matmul", row_by_row)
    cache = KVCache(1, PAGE * 32, block=PAGE, dtype=torch.float32, device=CPU)
    attention = TritonRows(PAGE * PAGES, 2, CPU, page=PAGE)
    query, keys, values = tensors(2, 1, 16, 16, cache.capacity)
    mine = cache.sequence()
    mine.append(range(-1, 24))
    mine.advance(range(25))

    def result(parents: list[int], node: int, others: list[tuple[SequenceState, int]], first_depth: int = 0) -> Tensor:
        """Of a node, after the keys and the query of each token were put where it lies now."""
        mine.append(parents)
        chunks = [*others, (mine, len(parents))]
        first = sum(count for _, count in others)
        asked = query.roll(first, 0)
        path = path_to(parents, node)
        for index, slot in enumerate(mine.pending_slots):
            if index in path:
                source = torch.Generator().manual_seed(first_depth + mine.depths[index])
                keys[slot], values[slot] = (torch.randn(1, 16, generator=source) for _ in range(2))
                asked[first + index] = torch.randn(2, 16, generator=source)
            else:
                keys[slot], values[slot] = float("inf"), float("nan")
        plan = attention.plan(rows_of(chunks, attention.group))
        found = attention(asked, keys, values, plan)[first + node]
        mine.rollback()
        return found

    chain = result([-1, 0, 1], 2, [])
    assert torch.equal(result([-1, -1, 1, 1, 3], 3 + 1, []), chain), "in a tree"
    assert torch.equal(result([-1, 0, 1], 2, chunks_of(cache, 3)), chain), "in a batch"
    mine.append([-1, 0])
    mine.advance([0, 1])
    assert torch.equal(result([-1], 0, [], first_depth=2), chain), "alone, behind what was kept"
    assert chain.isfinite().all()


def row_by_row(a: numpy.ndarray, b: numpy.ndarray, dtype: numpy.dtype) -> numpy.ndarray:
    """As a GPU multiplies: numpy's own product of a row depends on the row's place in the matrix."""
    return numpy.stack([(row[:, None] * b).sum(0) for row in a]).astype(dtype)


def path_to(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path


def test_the_trial_at_load_passes_and_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    attention, compute = TritonRows(400, 2, CPU), TritonRows.__call__
    found: list[Tensor] = []

    def keep(*inputs: object, **how: object) -> Tensor:
        found.append(compute(*inputs, **how))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(TritonRows, "__call__", keep)
    assert trial_error(attention, 2, torch.float32, CPU) < 1e-4
    monkeypatch.setattr(TritonRows, "__call__", lambda *_, **__: found.pop(0))
    monkeypatch.setattr(RowAttention, "__call__", lambda *_, **__: torch.full((16, 4, 64), float("nan")))
    assert not trial_error(attention, 2, torch.float32, CPU) < 1e-4
    assert not found


def test_where_there_are_no_kernels_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_attention(100, 2, torch.float32, CPU) is None and not caplog.records
    cuda = torch.device("cuda")
    monkeypatch.setattr(module, "TritonRows", lambda *_: None)
    for error, why in (
        (0.3, "off by 0.3"),
        (float("nan"), "off by nan"),
        (ModuleNotFoundError("No triton\nhere"), "No triton"),
    ):

        def trial(*_: object, error: object = error) -> float:
            if isinstance(error, Exception):
                raise error
            return error  # type: ignore[return-value]

        monkeypatch.setattr(module, "trial_error", trial)
        assert find_attention(100, 2, torch.bfloat16, cuda) is None
        (record,) = caplog.records
        assert why in record.message and "\n" not in record.message
        caplog.clear()


def test_splits_lie_where_they_lie_whatever_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert split_starts(100) == [0, 128]
    assert split_starts(1280) == [*range(0, 1025, 128), 1280]
    longest = split_starts(131_072)
    steps = [stop - start for start, stop in itertools.pairwise(longest)]
    assert steps == [128] * 8 + [256] * 28 + [512] * 16 + [1024] * 16 + [2048] * 16 + [4096] * 16
    assert split_starts(20_000) == [*longest[:55], 19_456, 20_480]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.attention import triton_rows as attention, row_attention_kernels as attention_kernels
from engine.cache.kv_store import PAGE

PRECISE, NUMBERS = ("sums_ptr", "maxima_ptr", "totals_ptr"), ("N", "T")
HALF = ("query_ptr", "keys_ptr", "values_ptr", "sinks_ptr", "out_ptr")

def shared(kernel, capability, dtype, **constants):
    def kind(name):
        if name in constants:
            return "constexpr"
        if not name.endswith("_ptr"):
            return "i32" if name in NUMBERS else "fp32"
        return "*fp32" if name in PRECISE else "*" + dtype if name in HALF else "*i32"
    source = ASTSource(fn=kernel, signature={name: kind(name) for name in kernel.arg_names}, constexprs=constants)
    options = {"num_warps": 4}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared

def attend(capability, dtype, heads, size, padded, window, capped):
    return shared(
        attention_kernels.attend_splits, capability, dtype, QUERY_HEADS=2 * heads, KEY_HEADS=heads, SIZE=size,
        SIZE_PADDED=padded, VALUE_SIZE=size, VALUE_PADDED=padded, PAGE=PAGE,
        BLOCK=attention.BLOCK // (1 if dtype == "bf16" else 2), STAGES=attention.STAGES, ROWS=attention.MIN_ROWS,
        WORK=attention.WORK, WINDOW=window, CAPPED=capped,
        PRECISION="ieee" if dtype == "fp32" else "tf32",
    )

taken = [
    attend(90, "bf16", 8, 128, 128, 0, False),
    attend(89, "bf16", 8, 256, 256, 4096, True),
    attend(89, "fp32", 8, 80, 128, 0, False),
]
assert max(taken) <= 99 << 10, f"an L4 has 99 KiB of shared memory for a program, asked for are {taken}"
shared(attention_kernels.list_splits, 89, "bf16", ROWS=128, SPLITS=128, WORK=attention.WORK)
for window, sinks in ((0, False), (4096, True)):
    shared(
        attention_kernels.add_splits, 89, "bf16", SPLITS=128, QUERY_HEADS=32, VALUE_SIZE=128, VALUE_PADDED=128,
        CHUNK=attention.CHUNK, WINDOW=window, SINKS=sinks,
    )
"""


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")
def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    assert_compiles(COMPILE, tmp_path)
