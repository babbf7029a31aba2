"""Pace, turns and choices of the benchmark, with contenders that only pretend."""

import pytest

from benchmarks import drafting
from benchmarks.harness import measure
from benchmarks.harness import transformers_baseline as baseline
from benchmarks.harness.measure import Batch, Decoded, Run, TimedCommit, best, pace, take_turns
from speculation.messages import AllBut, Schedule, Source


def request(*commits: tuple[float, int]) -> Decoded:
    return Decoded(tuple(range(sum(tokens for _, tokens in commits))), tuple(TimedCommit(at, n) for at, n in commits))


def run(tokens: int, seconds: float) -> Run:
    return Run((request((0.0, 1), (seconds, tokens)),))


def test_the_prompt_and_the_first_tokens_do_not_count():
    one = Run((request((10.0, 5), (10.5, 2), (12.0, 4)),))
    assert (one.start, one.end, one.tokens) == (10.0, 12.0, 6)
    assert one.rate == 3.0


def test_a_batch_is_timed_from_when_all_decode():
    one = Run((request((1.0, 1), (1.5, 1), (3.0, 2)), request((2.0, 1), (4.0, 3))))
    assert (one.start, one.end, one.tokens) == (2.0, 4.0, 5)
    assert one.rate == 2.5


def test_pace_is_taken_over_all_runs_together():
    assert pace([run(10, 1.0), run(10, 4.0)]) == 4.0


def test_the_best_choice_has_the_highest_pace_and_is_the_first_of_equals():
    assert best({2: [run(10, 1.0)], 4: [run(30, 2.0)], 6: [run(15, 1.0)], 8: [run(10, 3.0)]}) == 4
    # The highest rate on one prompt does not win.
    assert best({"a": [run(10, 1.0), run(10, 1.0)], "b": [run(40, 1.0), run(10, 9.0)]}) == "a"


async def test_contenders_take_turns_and_take_turns_in_beginning(monkeypatch):
    monkeypatch.setattr(measure, "SETTLE_SECONDS", 0.0)
    calls: list[tuple[str, int]] = []

    def pretending(name: str):
        async def decode(batch: Batch) -> Run:
            calls.append((name, batch.seed))
            return run(batch.seed + 1, 1.0)

        return decode

    batches = [Batch(((1,),), 8, seed=seed) for seed in range(3)]
    advanced: list[None] = []
    runs = await take_turns({"a": pretending("a"), "b": pretending("b")}, batches, 1, lambda: advanced.append(None))
    assert calls == [("a", 0), ("b", 0), ("b", 0), ("a", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    assert [one.tokens for one in runs["b"]] == [1, 2, 3], "the warm-up counted"
    assert len(advanced) == len(calls)


def test_contenders_ask_for_what_their_names_say():
    assert not measure.PLAIN.enabled
    assert measure.DRAFTED.sources == {Source.DRAFT}
    assert measure.WITH_LOOKUP.sources == AllBut()
    for schedule in (Schedule.SEQUENTIAL, Schedule.PARALLEL):
        asked = measure.in_chains(schedule, 5)
        assert (asked.schedule, asked.max_depth, asked.sources) == (schedule, 5, {Source.DRAFT})


def test_no_contender_leaves_answers_for_another_to_copy():
    asked = [measure.PLAIN, measure.DRAFTED, measure.WITH_LOOKUP, *drafting.STRUCTURED.values()]
    asked += [measure.in_chains(schedule, 3) for schedule in measure.LENGTHS]
    assert not any(one.remember for one in asked)


@pytest.mark.parametrize("mode", baseline.ASSISTED)
def test_modes_of_transformers_have_names_of_their_own(mode):
    assert [str(other) for other in baseline.ASSISTED].count(str(mode)) == 1
