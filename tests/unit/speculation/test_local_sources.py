"""Sources at the target: how they come into a session's trie, and what is told of every token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from speculation import digest as digests
from speculation.events import Emit, StepMetadata
from speculation.messages import (
    ANCHOR,
    SUPPORT_TOTAL,
    Limits,
    Open,
    Proposal,
    RequestOptions,
    Rule,
    Sampling,
    Schedule,
    SessionId,
    Source,
    Speculation,
    Support,
    Token,
    Verification,
)
from speculation.sources.registry import LocalSource
from speculation.trie import VerificationTree
from speculation.verifying.planner import Asked, Planner
from speculation.verifying.target_session import READ_AT_LEAST, READ_AT_ONCE, SharedEstimators, TargetSession

PROMPT = (1, 2, 3)
VOCABULARY = 100
PREDICTION = Speculation(sources=frozenset({Source.PREDICTION}))


def opened(
    prediction: Sequence[Token] = (), speculation: Speculation = Speculation(), generated: Sequence[Token] = ()
) -> Open:
    request_options = RequestOptions(prediction=tuple(prediction))
    tokens = (*PROMPT, *generated)
    return Open(
        SessionId(1),
        4,
        tokens,
        Sampling(),
        Limits(500),
        speculation,
        prompt=len(PROMPT),
        request_options=request_options,
    )


def session(prediction: Sequence[Token] = (), speculation: Speculation = Speculation(), **kwargs) -> TargetSession:
    return TargetSession(opened(prediction, speculation), vocabulary=VOCABULARY, **kwargs)


def drafted(to: TargetSession, *tokens: Token, q: bool = False) -> Proposal:
    """A drafter's chain from the end of the text."""
    parents = tuple(range(ANCHOR, len(tokens) - 1))
    supports = tuple(Support((token,), (SUPPORT_TOTAL,)) for token in tokens) if q else ()
    return Proposal(
        SessionId(1), 4, to.trie.position, to.trie.digest, tokens, parents, (0.5,) * len(tokens), q=supports
    )


def verify(to: TargetSession, truth: Sequence[Token], budget: int = 8) -> Verification:
    """A step in which the target says ``truth`` from the end of the text on, whatever it is offered."""
    tree = to.begin_verification(to.candidates(budget))
    ends = [0, *(node.end - to.trie.position for node in tree.nodes)]
    return to.commit([truth[end] for end in ends]).verification


def emitted(verification: Verification) -> Emit:
    """What a session makes of it."""
    about = StepMetadata(verification.sources, verification.refused, verification.recovered)
    return Emit(verification.tokens, verification.accepted, verification.offered, metadata=about)


def told(verification: Verification) -> list[str]:
    """Where each of its tokens came from."""
    return [str(origin) for origin in emitted(verification).origins]


# -- where tokens come from --------------------------------------------------------------------------------------------


def test_the_targets_own_token_is_recovered_bonus_or_plain() -> None:
    one = session()
    assert told(verify(one, [10])) == ["target"]
    one.propose(drafted(one, 11, 12))
    assert told(verify(one, [11, 12, 13])) == ["draft", "draft", "bonus"]
    one.propose(drafted(one, 14, 15))
    assert told(verify(one, [14, 20, 0])) == ["draft", "recovered"]
    one.propose(drafted(one, 16))
    assert told(verify(one, [21, 0])) == ["recovered"]


def test_a_branch_that_is_left_alone_recovers_nothing() -> None:
    """What counts is what was offered where the path ended, not how much was offered in all."""
    one = session()
    one.propose(replace(drafted(one, 11, 12), parents=(ANCHOR, ANCHOR)))
    verification = verify(one, [12, 13])
    assert (verification.accepted, verification.offered) == (1, 2)
    assert told(verification) == ["draft", "bonus"]


def test_each_draft_is_credited_to_its_source_whether_kept_or_not() -> None:
    one = session([30, 31, 32, 33], replace(Speculation(), sources=frozenset({Source.DRAFT, Source.PREDICTION})))
    one.propose(drafted(one, 40, 41))
    verification = verify(one, [30, 31, 50, 0, 0])
    assert told(verification) == ["prediction", "prediction", "recovered"]
    assert Counter(verification.refused) == {Source.DRAFT: 2, Source.PREDICTION: 2}
    assert emitted(verification).from_draft_models == (0, 2)


def test_drafts_of_drafters_alone_need_no_words() -> None:
    one = session()
    one.propose(drafted(one, 11, 12))
    verification = verify(one, [11, 50, 0])
    assert (verification.sources, verification.refused) == ((), ())
    assert emitted(verification).refused == (Source.DRAFT,)


def test_a_stop_token_among_the_drafts_leaves_no_token_of_the_targets_own() -> None:
    stopping = replace(opened([30, 31, 32]), limits=Limits(500, frozenset({31})))
    one = TargetSession(stopping, vocabulary=VOCABULARY)
    assert told(verify(one, [30, 31, 32, 0])) == ["prediction", "prediction"]


# -- sources -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Says:
    """All that a source of one's own takes."""

    tokens: tuple[Token, ...]
    confidence: tuple[float, ...]
    source: Source = Source.LOOKUP
    depth: int = 5

    @property
    def parents(self) -> range:
        return range(ANCHOR, len(self.tokens) - 1)

    def extend(self, tokens: Sequence[Token]) -> None:
        """Goes by nothing."""

    def propose(self, depth: int) -> Says:
        return self


def test_a_source_of_ones_own_drafts_what_it_says() -> None:
    one = session(sources=[Says((7, 8), (0.9, 0.8))])
    assert one.candidates(8).tokens == (7, 8)
    assert told(verify(one, [7, 8, 9])) == ["lookup", "lookup", "bonus"]


def test_the_surest_source_comes_first_and_who_drafted_a_token_first_has_it() -> None:
    sources = [Says((7, 8), (0.6, 0.6), Source.LOOKUP), Says((7, 9), (0.8, 0.7), Source.PREDICTION)]
    found = {node.token: (node.source, node.rank) for node in session(sources=sources).candidates(8).nodes}
    assert found == {7: (Source.PREDICTION, 0), 9: (Source.PREDICTION, 0), 8: (Source.LOOKUP, 1)}


def test_a_request_has_the_sources_it_allows() -> None:
    sources = [Says((7,), (0.9,), Source.LOOKUP), Says((8,), (0.9,), Source.PREDICTION)]
    for speculation, tokens in (
        (PREDICTION, (8,)),
        (replace(PREDICTION, enabled=False), ()),
        (replace(PREDICTION, schedule=Schedule.SEQUENTIAL), ()),
        (Speculation(sources=frozenset()), ()),
    ):
        assert session(speculation=speculation, sources=sources).candidates(8).tokens == tokens


def test_a_chain_that_drafters_serve_is_left_to_them_unless_a_source_is_sure() -> None:
    chain = Speculation(rule=Rule.REJECTION)
    assert session(speculation=chain, sources=[Says((7,), (0.8,))]).candidates(8) == VerificationTree()
    sure = session(speculation=chain, sources=[Says((7, 8), (0.9, 0.9))])
    assert sure.candidates(8).tokens == (7, 8)
    late = session(speculation=chain, sources=[Says((7, 8), (0.9, 0.9))])
    late.propose(drafted(late, 9, q=True))
    assert late.candidates(8).tokens == (9,)
    goes_on = session(speculation=chain, sources=[Says((7, 8), (0.9, 0.9))])
    goes_on.propose(drafted(goes_on, 7, q=True))
    assert goes_on.candidates(8).tokens == (7, 8)
    assert [node.q is None for node in goes_on.candidates(8).nodes] == [False, True]


# -- predictions -------------------------------------------------------------------------------------------------------


def milliseconds(tokens: int) -> int:
    """What a step takes: that of 8 drafts a third more than one without."""
    return 100 + 4 * tokens


def steps(one: TargetSession, truth: Sequence[Token]) -> Counter[str]:
    """Decode ``truth`` after the prompt, by marginal gain; counts, and what a machine would take, in milliseconds."""
    planner = Planner()
    for size in range(1, 16):
        planner.observe(1, size, milliseconds(size))
    counts: Counter[str] = Counter()
    while (done := len(one.tokens) - len(PROMPT)) < len(truth):
        plan = planner.plan([Asked(one, 8)], now=0.0)
        tree = plan.trees[0]
        assert tree is not None
        ends = [done, *(done + node.end - one.trie.position for node in tree.nodes)]
        verification = one.commit([truth[end] if end < len(truth) else 0 for end in ends]).verification
        expected = list(truth[done : done + len(verification.tokens)])
        assert list(verification.tokens)[: len(expected)] == expected
        counts += Counter(milliseconds=milliseconds(1 + verification.offered))
        counts += Counter(steps=1, offered=verification.offered, accepted=verification.accepted)
        counts += Counter(told(verification))
    return counts


@pytest.fixture
def text() -> list[Token]:
    rng = random.Random(8)
    return [rng.randrange(VOCABULARY) for _ in range(240)]


def test_a_right_prediction_takes_a_fraction_of_the_steps(text: list[Token]) -> None:
    counts = steps(session(text, PREDICTION), text)
    assert counts["steps"] < len(text) / 6
    assert counts["milliseconds"] < milliseconds(1) * len(text) / 4
    assert counts["prediction"] > 0.8 * len(text)


def test_an_edited_prediction_helps_nearly_as_much(text: list[Token]) -> None:
    edited = [99 if i % 30 == 7 else token for i, token in enumerate(text) if i % 40 != 20]
    assert steps(session(text, PREDICTION), edited)["steps"] < len(edited) / 3


@pytest.mark.parametrize("alike", [VOCABULARY, 4], ids=["unlike", "alike in pairs everywhere"])
def test_a_wrong_prediction_is_soon_no_longer_verified(text: list[Token], alike: int) -> None:
    """So it costs next to nothing; where tokens agree by accident, some of it even pays."""
    rng = random.Random(9)
    wrong = [rng.randrange(alike) for _ in range(400)]
    truth = [token % alike for token in text]
    counts = steps(session(wrong, PREDICTION), truth)
    plain = steps(session((), PREDICTION), truth)
    assert (plain["steps"], plain["offered"]) == (len(truth), 0)
    assert counts["milliseconds"] < 1.01 * plain["milliseconds"]
    assert counts["offered"] > 0


def test_what_comes_of_a_session_opened_again_goes_on_with_the_prediction(text: list[Token]) -> None:
    again = TargetSession(opened(text, PREDICTION, generated=text[:50]), vocabulary=VOCABULARY)
    assert again.candidates(4).tokens == tuple(text[50:54])
    assert again.trie.digest == digests.of((*PROMPT, *text[:50]))


def test_a_prediction_is_not_read_into_the_prompt(text: list[Token]) -> None:
    one = session(PROMPT * 3, PREDICTION)
    one.index(2)
    assert one.candidates(2).tokens == PROMPT[:2]


# -- long prompts ------------------------------------------------------------------------------------------------------


class Reads(Says):
    """Keeps what it is told, and in parts of which size."""

    def __init__(self, source: Source) -> None:
        super().__init__((7, 8), (0.9, 0.8), source)
        self.read: list[Token] = []
        self.parts: list[int] = []

    def extend(self, tokens: Sequence[Token]) -> None:
        self.read += tokens
        self.parts.append(len(tokens))


LONG = [1 + i % 50 for i in range(5000)]


def reading(*sources: LocalSource, shared: SharedEstimators | None = None) -> TargetSession:
    long = replace(opened(generated=LONG), limits=Limits(2 * len(LONG)))
    return TargetSession(long, vocabulary=VOCABULARY, sources=sources, shared_estimators=shared)


def test_a_long_prompt_found_in_the_cache_is_read_over_several_steps_and_only_then_a_source_is_asked() -> None:
    source, shared = Reads(Source.LOOKUP), SharedEstimators()
    one = reading(source, shared=shared)
    while len(source.read) + READ_AT_ONCE < len(one.tokens):
        before, shared.unread = len(source.parts), READ_AT_ONCE
        assert told(verify(one, [9])) == ["target"]
        assert source.parts[before:] == [READ_AT_ONCE]
    shared.unread = READ_AT_ONCE
    assert one.candidates(8).tokens == (7, 8)
    assert source.read == one.tokens


def test_sessions_that_read_long_prompts_share_what_a_step_has_time_for() -> None:
    sources, planner = [Reads(Source.LOOKUP) for _ in range(8)], Planner()
    sessions = [reading(source, shared=planner.shared_estimators) for source in sources]
    planner.plan([Asked(one, 0) for one in sessions], 0.0)
    for one in sessions:  # the step in which they come: all but a few tokens were found in the cache
        one.commit([9])
        one.index(len(one.tokens), computed=8)
    assert sum(len(source.read) for source in sources) <= READ_AT_ONCE + len(sessions) * (READ_AT_LEAST + 8)
    steps = 1
    while any(len(source.read) < len(LONG) for source in sources):
        before = [len(source.read) for source in sources]
        plan = planner.plan([Asked(one, 8) for one in sessions], 0.0)
        for one, tree in zip(sessions, plan.trees, strict=True):
            one.commit([9] * (1 + len(tree.tokens if tree else ())))
        grown = [len(source.read) - length for source, length in zip(sources, before, strict=True)]
        assert min(grown) > 0, "each reads on"
        assert sum(grown) <= READ_AT_ONCE + len(sessions) * READ_AT_LEAST
        steps += 1
    assert steps < 1.5 * len(sessions) * len(LONG) / READ_AT_ONCE, "no step leaves time unused"


def test_a_prompt_that_is_computed_is_read_with_it() -> None:
    source = Reads(Source.LOOKUP)
    one = reading(source)
    for end in (3000, len(one.tokens)):
        one.index(end, computed=3000)
        assert source.read == one.tokens[:end]
    assert one.candidates(8).tokens == (7, 8)
    one.index(10)
    assert source.parts == [3000, 2003]


def test_a_source_that_skims_its_prompt_is_asked_at_once_while_others_read() -> None:
    one = reading(Reads(Source.LOOKUP), Says((9,), (0.9,), Source.PREDICTION), Says((10,), (0.8,), Source.SUFFIX))
    assert one.candidates(8).tokens == (9, 10)
