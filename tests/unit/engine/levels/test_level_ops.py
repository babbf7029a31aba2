"""What computes draft levels against the plain operations that define them: C++, and kernels.

Where there is no GPU the kernels are interpreted.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from engine.cpu.levels import CpuLevelOps
from engine.cpu.library import find_library
from engine.eagle.cached import slots_above
from engine.levels.level_memory import MAX_LEVELS, TOLD, LevelMemory
from engine.levels.level_ops import LevelOps
from engine.sampling.noise import gumbel, keys_at
from speculation.verifying.calibration import CELLS, RANKS
from tests.by_rows import check_groups, slots_seen

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGES, SPARE = 5, 1000


@pytest.fixture(params=["C++", "Triton"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LevelOps:
    if request.param == "C++":
        library = find_library()
        if library is None or DEVICE.type == "cuda":
            pytest.skip("no C++ compiler, or a processor without AVX2; or a GPU is tested")
        return CpuLevelOps(library)
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no Triton")
    from engine.cuda import draw_kernels, level_kernels

    # Parts so short that a row has several; the interpreter takes milliseconds for each.
    monkeypatch.setattr(draw_kernels, "PART", 32)
    return level_kernels.TritonLevelOps(DEVICE)


def memory_of(
    sessions: int = 2, width: int = 4, children: int = 3, vocabulary: int = 75, *, greedy: int = 2
) -> LevelMemory:
    """What a launch is told at random: leaves from before it, places at home and away, some of each not there.

    Every session whose number has the divisor ``greedy`` is.
    """
    generator = torch.Generator().manual_seed(3)
    memory = LevelMemory(
        sessions,
        width,
        children,
        5,
        group=max(1, width // 2),
        spare=SPARE,
        pages=PAGES,
        vocabulary=vocabulary,
        dtype=torch.float32,
        device=DEVICE,
    )

    def real(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    memory.odds_F.copy_(torch.cat((0.5 + real(RANKS), 0.3 + real(CELLS), 0.5 * real(CELLS))))
    end_NL, home_NL = whole(1, 20, sessions, 5 + width), whole(1, 20, sessions, 5 + width)
    home_NL = torch.minimum(home_NL, end_NL)
    tables = sessions * PAGES
    branch_NL = memory.tail_start + tables + (end_NL - home_NL).flatten().cumsum(0).view_as(end_NL) - end_NL + home_NL
    memory.rows.numbers_F[memory.tail_start :].copy_(whole(0, 900, len(memory.rows.numbers_F) - memory.tail_start))
    for name, value in {
        "factor": 0.5 + real(sessions, RANKS),
        "temperature": (0.3 + real(sessions, 1)) * ((torch.arange(sessions)[:, None] + 1) % greedy > 0),
        "min_weight": 0.01 * real(sessions, 1),
        "weight": real(sessions, width) * (real(sessions, width) > 0.3),
        "leaf_weight": 0.3 * real(sessions, 5) * (real(sessions, 5) > 0.4),
        "seed": whole(-(1 << 63), (1 << 63) - 1, sessions, 1),
        "width": torch.full((sessions, 1), width) - (torch.arange(sessions)[:, None] % 2) * (width > 1),
        "children": torch.full((sessions, 1), children),
        "position": whole(1, 8, sessions, 1),
        "max_end": whole(18, 22, sessions, 1),
        "before": torch.arange(sessions)[:, None] % 2,
        "table": memory.tail_start + PAGES * torch.arange(sessions)[:, None],
        "stop": torch.cat((whole(0, vocabulary, sessions, 6), torch.full((sessions, 2), -1)), 1),
        "leaf_token": whole(0, vocabulary, sessions, 5),
        "slot": whole(0, 900, sessions, (MAX_LEVELS - 1) * width),
        "end": end_NL,
        "home": home_NL,
        "branch": branch_NL,
    }.items():
        memory.fields[name].copy_(value)
    return memory


def logits_of(memory: LevelMemory, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """With something behind the vocabulary, as heads of a model leave it."""
    shape = (memory.count, memory.logits_MV.shape[1] + 7)
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


def assert_same(found: LevelMemory, expected: LevelMemory) -> None:
    for name in ("buffer", "level_N", "branch_NLB", "home_NL", "end_NL", "token_NP"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in ("weight_NP", "place_weight_NW"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=3e-5, atol=1e-12, msg=name)
    behind = TOLD + found.children
    assert torch.equal(found.found_KNWX[..., :behind], expected.found_KNWX[..., :behind])
    torch.testing.assert_close(found.found_KNWX[..., behind:], expected.found_KNWX[..., behind:], rtol=1e-5, atol=1e-30)


def test_rows_find_those_that_they_hang_from() -> None:
    """What is there to pad hangs from none, whatever its numbers would come to."""
    memory, ops = memory_of(sessions=3), LevelOps()
    memory.record_NS[2] = 0
    ops.begin(memory)
    seen: list[int] = []
    for level in range(3):
        ops.expand(memory, logits_of(memory, level), noisy=False)
        for slots, above in zip(slots_seen(memory.rows, 8), slots_above(memory.rows, 8).tolist(), strict=True):
            assert above == (slots[-2] if len(slots) > 1 else 0)
            seen.append(len(slots))
    assert max(seen) > 1 and seen.count(0) >= 3 * memory.width


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(
    ("sizes", "dtype", "levels"),
    [
        ({}, torch.float32, 4),
        ({"sessions": 1, "width": 1, "children": 1, "vocabulary": 4}, torch.float32, MAX_LEVELS + 1),
        ({"sessions": 3, "width": 2, "children": 4, "vocabulary": 32}, torch.bfloat16, 2),
    ],
    ids=["several parts", "hardly any tokens", "one part"],
)
def test_levels_are_those_of_the_plain_operations(
    ops: LevelOps, sizes: dict[str, int], dtype: torch.dtype, levels: int, noisy: bool
) -> None:
    """Up to one more than there may be, which changes nothing that was there before the last."""
    found, expected = (memory_of(**sizes, greedy=2 if noisy else 1) for _ in range(2))
    plain = LevelOps()
    ops.begin(found)
    plain.begin(expected)
    assert_same(found, expected)
    active = 0
    for level in range(levels):
        logits_MX = logits_of(found, level, dtype)
        ops.expand(found, logits_MX, noisy=noisy)
        plain.expand(expected, logits_MX, noisy=noisy)
        assert_same(found, expected)
        check_groups(found.rows)
        active += int((found.place_weight_NW > 0).sum())
    assert active, "nothing was expanded"


@pytest.mark.parametrize("noisy", [False, True])
def test_logits_that_are_no_numbers_and_tokens_that_cannot_be(ops: LevelOps, noisy: bool) -> None:
    found, expected = memory_of(), memory_of()
    logits_MX = logits_of(found, 1)
    logits_MX[0, 40] = float("nan")
    logits_MX[1, 40] = float("inf")
    logits_MX[2, :75] = -float("inf")
    logits_MX[3, 2:75] = -float("inf")
    logits_MX[4, :75] = float("nan")
    logits_MX[5, :32] = -float("inf")
    plain = LevelOps()
    for each, memory in ((ops, found), (plain, expected)):
        each.begin(memory)
        each.expand(memory, logits_MX, noisy=noisy)
    sound_M, count_M = found.found_KNWX[0, ..., 1].flatten().bool().tolist(), found.found_KNWX[0, ..., 2].flatten()
    assert sound_M == [False, False, False, True, False, True, True, True]
    assert count_M.tolist() == [0, 0, 0, 2, 0, 3, 3, 3]
    assert found.found_KNWX.isfinite().all() and found.weight_NP.isfinite().all()
    assert torch.equal(found.found_KNWX[..., :TOLD], expected.found_KNWX[..., :TOLD])
    torch.testing.assert_close(found.weight_NP, expected.weight_NP, rtol=1e-5, atol=1e-12)


def test_the_first_of_equals_is_chosen(ops: LevelOps) -> None:
    """Of tokens with the same logit and of leaves with the same weight, minus zero being zero."""
    found, expected = memory_of(greedy=1), memory_of(greedy=1)
    logits_MX = logits_of(found, 1).round().clamp(-1, 0)
    logits_MX[0, ::2] = -0.0
    for each, memory in ((ops, found), (LevelOps(), expected)):
        memory.fields["leaf_weight"].fill_(0.25)
        memory.fields["weight"].fill_(0.0)
        each.begin(memory)
        each.expand(memory, logits_MX, noisy=False)
    assert_same(found, expected)
    assert found.found_KNWX[1, 0, :, 0].tolist() == [0, 1, 2, 3]
    best_MC = [[v for v, logit in enumerate(row) if logit == max(row)][:3] for row in logits_MX[:, :75].tolist()]
    assert found.found_KNWX[0, ..., TOLD : TOLD + 3].flatten(0, 1).tolist() == best_MC


def test_noise_decides_as_on_the_host(ops: LevelOps) -> None:
    """Equal logits leave the choice to the noise alone, at the position behind each place."""
    memory = memory_of(greedy=3)
    memory.fields["temperature"].fill_(1.0)
    ops.begin(memory)
    ops.expand(memory, torch.zeros(8, 75, device=DEVICE), noisy=True)
    end_M = memory.fields["end"][:, 5:].flatten()
    noise_MV = gumbel(keys_at(memory.fields["seed"].expand(-1, 4).flatten(), end_M), 75, torch.float32, DEVICE)
    best_MC, tokens_MC = noise_MV.topk(7)
    found_MX = memory.found_KNWX[0].flatten(0, 1)
    assert torch.equal(found_MX[:, TOLD : TOLD + 3].long(), tokens_MC[:, :3])
    torch.testing.assert_close(found_MX[:, TOLD + 3 :].float(), best_MC.softmax(-1)[:, :3], rtol=1e-5, atol=0.0)
