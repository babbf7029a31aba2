"""Whatever drafters send, a session commits the target's own text, keeps its limits, and nothing raises."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculation import digest as digests
from speculation.messages import (
    ANCHOR,
    SUPPORT_TOTAL,
    Limits,
    Open,
    Proposal,
    Sampling,
    Schedule,
    SessionId,
    Source,
    Speculation,
    Support,
    Token,
)
from speculation.trie import InsertResult, TrieLimits, VerificationTree
from speculation.verifying.target_session import TargetSession
from tests.faults.toy_workers import VOCABULARY, target_only, toy_model

PROMPT = (3, 1, 4, 1, 5)
END = len(PROMPT) + 30
EPOCH = 3
LIMITS = TrieLimits(nodes=16, depth=8, children=3)

RIGHT = None
"""Stands for the target's own token at that place: garbage is most dangerous among drafts that are kept."""
OUTSIDE = (-1, VOCABULARY, 2**32 - 1, -(2**63), 2**64)


@dataclass(frozen=True)
class Anchor:
    """Where a proposal claims to hang: a place counted back from the last one and round again, then spoiled."""

    back: int
    drafted: bool
    """Below a draft token, if there is one, rather than in the committed text."""
    unknown: tuple[Token, ...]
    """Tokens nobody has seen, after that place."""
    shift: int
    spoil: int


@dataclass(frozen=True)
class Draft:
    """A proposal before it is known what is committed when it arrives."""

    anchor: Anchor
    tokens: tuple[Token | None, ...]
    parents: tuple[int, ...]
    confidence: tuple[float, ...]
    drawn: bool
    """With a q for every token."""
    source: Source
    epoch: int
    times: int


@dataclass(frozen=True)
class Step:
    """A target step: how much it may verify, how much of that it does, and what arrives meanwhile."""

    budget: int
    share: int
    meanwhile: tuple[Draft, ...]


def mostly(usual: object, *faults: object) -> st.SearchStrategy:
    """Each fault alone is rare, so that most proposals have one or none and get far."""
    return st.sampled_from([usual] * 8 * len(faults) + list(faults))


anchors = st.builds(
    Anchor,
    back=st.one_of(st.just(0), st.integers(0, 6), st.integers(0, 1000)),
    drafted=st.booleans(),
    unknown=mostly((), (9,), (9, 9, 9)),
    shift=mostly(0, 1, -1, -(2**40), 2**40),
    spoil=mostly(0, 1, 2**63),
)
right_or_valid = st.one_of(st.just(RIGHT), st.just(RIGHT), st.integers(0, VOCABULARY - 1))
anything = st.one_of(right_or_valid, st.sampled_from(OUTSIDE))
extremes = st.sampled_from([0.0, 1.0, 0.5, -1.0, 2.0, 5e-324, 1e308, float("inf"), -float("inf")])


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, ...]:
    """Parents: long chains, wide stars, and anything between."""
    size = draw(st.integers(0, 30))
    reach = draw(st.sampled_from([1, 3, size + 1]))  # how many tokens back a parent lies at most
    star = draw(st.booleans()) and reach > 1
    return tuple(ANCHOR if star and i % 3 else draw(st.integers(max(i - reach, ANCHOR), i - 1)) for i in range(size))


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    parents = draw(trees())
    size = len(parents)
    tokens = draw(mostly(right_or_valid, anything))
    return Draft(
        anchor=draw(anchors),
        tokens=tuple(draw(st.lists(tokens, min_size=size, max_size=size))),
        parents=parents,
        confidence=tuple(draw(st.lists(extremes, min_size=size, max_size=size))) if draw(st.booleans()) else (),
        drawn=draw(st.booleans()),
        source=draw(st.sampled_from(Source)),
        epoch=EPOCH + draw(mostly(0, -1, 1, -EPOCH)),
        times=draw(st.sampled_from([1, 1, 2, 3])),
    )


steps = st.builds(
    Step, budget=st.integers(0, 40), share=st.integers(0, 100), meanwhile=st.lists(drafts(), max_size=2).map(tuple)
)
speculations = st.builds(
    Speculation,
    enabled=mostly(True, False),
    max_depth=mostly(64, 0, 1, 4, 2**32 - 1),
    schedule=st.sampled_from([Schedule.TRIE, *Schedule]),
    sources=mostly(frozenset(Source), frozenset([Source.DRAFT]), frozenset([Source.LOOKUP])),
)


def open_session(seed: int, speculation: Speculation, stop: frozenset[Token] = frozenset()) -> TargetSession:
    opened = Open(SessionId(1), EPOCH, PROMPT, Sampling(seed=seed), Limits(END, stop), speculation)
    return TargetSession(opened, vocabulary=VOCABULARY, trie_limits=LIMITS)


@settings(max_examples=300, print_blob=True)
@given(
    st.integers(0, 2**64 - 1),
    speculations,
    st.frozensets(st.integers(0, VOCABULARY - 1), max_size=1),
    st.lists(st.one_of(drafts(), steps), min_size=4, max_size=25),
)
@pytest.mark.thorough
def test_no_proposal_changes_the_text_breaks_a_limit_or_raises(seed, speculation, stop, script):
    session = open_session(seed, speculation, stop)
    for action in script:
        match action:
            case Draft():
                deliver(session, action)
            case Step() if not session.finished:
                run(session, action)
    while not session.finished:
        run(session, Step(budget=8, share=100, meanwhile=()))
    truth = target_only(PROMPT, seed, END)
    last = next((i for i, token in enumerate(truth) if token in stop), len(truth) - 1)
    assert tuple(session.tokens) == (*PROMPT, *truth[: last + 1])


@pytest.mark.parametrize("seed", range(5))
def test_right_drafts_are_kept_beside_garbage(seed):
    """Else the property above would hold of a session that drops everything."""
    session = open_session(seed, Speculation(sources=frozenset([Source.DRAFT])))
    start = Anchor(back=0, drafted=False, unknown=(), shift=0, spoil=0)
    chain = Draft(start, (RIGHT,) * 6, tuple(range(ANCHOR, 5)), (), False, Source.DRAFT, EPOCH, times=2)
    garbage = Draft(start, (0, 1, 2, RIGHT, 5), (ANCHOR, 0, 0, 0, 3), (0.0,) * 5, True, Source.DRAFT, EPOCH, times=1)
    outside = replace(chain, tokens=(VOCABULARY,) * 6)
    for draft in (garbage, outside, chain):
        deliver(session, draft)
    assert run(session, Step(budget=LIMITS.nodes, share=100, meanwhile=(garbage,))) == 6, f"seed {seed}"
    assert tuple(session.tokens) == (*PROMPT, *target_only(PROMPT, seed, len(PROMPT) + 7)), f"seed {seed}"


def draw_after(session: TargetSession, context: Sequence[Token]) -> Token:
    """The target's token; within the prompt, the prompt's."""
    position = len(context)
    return PROMPT[position] if position < len(PROMPT) else toy_model(context, session.opened.sampling.seed, position)


def deliver(session: TargetSession, draft: Draft) -> None:
    """Push a proposal as often as it says; it adds what it says it adds, and a repetition adds nothing."""
    proposal = build(session, draft)
    for time in range(draft.times):
        before = len(session.trie)
        placed = session.propose(proposal)
        assert (placed is InsertResult.PLACED) == (len(session.trie) > before)
        assert time == 0 or len(session.trie) == before
        if draft.epoch != EPOCH or not session.opened.speculation.enabled:
            assert placed is InsertResult.STALE
        check_limits(session)


def build(session: TargetSession, draft: Draft) -> Proposal:
    prefix = anchor_prefix(session, draft.anchor)
    paths: list[tuple[Token, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        above = prefix if parent == ANCHOR else paths[parent]
        paths.append((*above, draw_after(session, above) if token is RIGHT else token))
    tokens = tuple(path[-1] for path in paths)
    return Proposal(
        session=SessionId(1),
        epoch=draft.epoch,
        anchor_position=len(prefix) + draft.anchor.shift,
        anchor_digest=digests.of(prefix) ^ draft.anchor.spoil,
        tokens=tokens,
        parents=draft.parents,
        confidence=draft.confidence,
        source=draft.source,
        q=tuple(Support((token, token + 1), (1, SUPPORT_TOTAL - 1)) for token in tokens) if draft.drawn else (),
    )


def anchor_prefix(session: TargetSession, anchor: Anchor) -> tuple[Token, ...]:
    committed, nodes = tuple(session.tokens), list(session.trie)
    if anchor.drafted and nodes:
        path = nodes[-1 - anchor.back % len(nodes)].path_from(session.trie.root)
        return (*committed, *(node.token for node in path), *anchor.unknown)
    return (*committed[: len(committed) - anchor.back % (len(committed) + 1)], *anchor.unknown)


def run(session: TargetSession, step: Step) -> int:
    """One target step; returns how many drafts were accepted."""
    candidates = session.candidates(step.budget)
    tree = session.begin_verification(candidates.first(len(candidates.nodes) * step.share // 100))
    check_tree(session, tree, step.budget)
    position = len(session.tokens)
    contexts = [tuple(session.tokens)]
    contexts += [(*contexts[0], *(n.token for n in node.path_from(session.trie.root))) for node in tree.nodes]
    for draft in step.meanwhile:
        deliver(session, draft)
    commit = session.commit([draw_after(session, context) for context in contexts])
    verification = commit.verification
    assert verification.position == position
    assert verification.tokens == tuple(session.tokens[position:])
    assert verification.digest == digests.of(session.tokens)
    accepted = tuple(tree.nodes[i].token for i in commit.kept)
    assert accepted == verification.tokens[: verification.accepted]
    assert verification.offered == len(tree.nodes)
    check_limits(session)
    return verification.accepted


def check_tree(session: TargetSession, tree: VerificationTree, budget: int) -> None:
    speculation = session.opened.speculation
    assert len(tree.nodes) <= (budget if speculation.enabled else 0)
    assert all(ANCHOR <= parent < i for i, parent in enumerate(tree.parents))
    assert all(0 <= token < VOCABULARY for token in tree.tokens)
    for node, parent in zip(tree.nodes, tree.parents, strict=True):
        assert node.parent is (session.trie.root if parent == ANCHOR else tree.nodes[parent])
        assert node.end - len(session.tokens) <= speculation.max_depth
        assert node.end < END


def check_limits(session: TargetSession) -> None:
    trie = session.trie
    children = 1 if session.opened.speculation.chains else LIMITS.children
    assert len(list(trie)) == len(trie) <= LIMITS.nodes
    assert trie.lead <= LIMITS.depth
    assert len(trie.root.children) <= children
    for node in trie:
        assert len(node.children) <= children
        assert 0 < node.weight <= 1
