"""Whatever is proposed, in whatever order, the target's own sequence comes out."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from speculation import digest as digests
from speculation.messages import ANCHOR, Limits, Open, Proposal, RequestOptions, Sampling, SessionId, Token
from speculation.trie import SpeculationTrie, TrieLimits
from speculation.verifying.target_session import TargetSession

VOCABULARY = 4
END = 24

tokens = st.integers(-1, VOCABULARY)  # one below and one above what is valid


@st.composite
def proposals(draw: st.DrawFn) -> tuple[int, int, tuple[Token, ...], tuple[int, ...]]:
    """How far back from the current end the anchor lies, how its digest is spoiled, and any tree."""
    size = draw(st.integers(0, 8))
    parents = tuple(draw(st.integers(ANCHOR, i - 1)) for i in range(size))
    return draw(st.integers(-2, 3)), draw(st.sampled_from([0, 0, 0, 1])), tuple(draw(tokens) for _ in parents), parents


def target_draw(prefix: tuple[Token, ...]) -> Token:
    return digests.of(prefix) % VOCABULARY


@settings(max_examples=300)
@given(st.lists(st.tuples(proposals(), st.booleans(), st.integers(0, 6)), max_size=60))
def test_the_output_does_not_depend_on_the_proposals(script):
    prompt = (1, 2)
    truth = list(prompt)
    while len(truth) < END:
        truth.append(target_draw(tuple(truth)))
    opened = Open(SessionId(1), 1, prompt, Sampling(), Limits(END))
    session = TargetSession(opened, vocabulary=VOCABULARY, trie_limits=TrieLimits(nodes=16, depth=6, children=3))
    emitted: list[Token] = []

    def step(budget: int) -> None:
        offer = session.begin_verification(session.candidates(budget))
        assert len(offer.nodes) <= budget
        contexts = [tuple(session.tokens)]
        for node in offer.nodes:
            contexts.append((*session.tokens, *(above.token for above in node.path_from(session.trie.root))))
        emitted.extend(session.commit([target_draw(context) for context in contexts]).verification.tokens)

    for (back, spoil, drafted, parents), verify, budget in script:
        position = max(min(len(session.tokens) - back, END), 0)
        digest = digests.of(truth[:position]) ^ spoil
        session.propose(Proposal(SessionId(1), 1, position, digest, drafted, parents))
        check_trie(session.trie)
        if verify and not session.finished:
            step(budget)
            check_trie(session.trie)
    while not session.finished:
        step(4)
    assert (*prompt, *emitted) == tuple(session.tokens) == tuple(truth)


def true_text(prompt: tuple[Token, ...]) -> list[Token]:
    truth = list(prompt)
    while len(truth) < END:
        truth.append(target_draw(tuple(truth)))
    return truth


edits = st.lists(
    st.tuples(st.integers(0, END), st.sampled_from(["replace", "insert", "leave out"]), tokens), max_size=4
)


@settings(max_examples=200)
@given(st.tuples(st.integers(0, 3), st.integers(0, 3)), edits, st.booleans(), st.lists(st.integers(0, 6)), st.data())
def test_the_output_does_not_depend_on_the_prediction(prompt, changes, right, budgets, data):
    """However the text differs from it, and wherever the session is opened again."""
    truth = true_text(prompt)
    predicted = truth[len(prompt) :] if right else [token % VOCABULARY for token in range(END)]
    for at, change, token in changes:
        predicted[at : at + (change != "insert")] = [] if change == "leave out" else [abs(token) % VOCABULARY]
    opened = Open(
        SessionId(1),
        1,
        prompt,
        Sampling(),
        Limits(END),
        prompt=len(prompt),
        request_options=RequestOptions(prediction=tuple(predicted)),
    )
    limits = TrieLimits(nodes=16, depth=6, children=3)
    session = TargetSession(opened, vocabulary=VOCABULARY, trie_limits=limits)
    for step in range(END):
        if session.finished:
            break
        if data.draw(st.booleans()):
            opened = replace(opened, epoch=opened.epoch + 1, tokens=tuple(session.tokens))
            session = TargetSession(opened, vocabulary=VOCABULARY, trie_limits=limits)
        offer = session.begin_verification(session.candidates(budgets[step] if step < len(budgets) else 4))
        contexts = [tuple(session.tokens)]
        for node in offer.nodes:
            contexts.append((*session.tokens, *(above.token for above in node.path_from(session.trie.root))))
        verification = session.commit([target_draw(context) for context in contexts]).verification
        assert len(verification.sources) in (0, verification.accepted)
        assert len(verification.refused) in (0, verification.offered - verification.accepted)
        check_trie(session.trie)
    assert session.finished
    assert session.tokens == truth


def check_trie(trie: SpeculationTrie) -> None:
    trie.validate()
    assert len(trie) <= trie.limits.nodes
    assert trie.lead <= trie.limits.depth
    for node in trie:
        assert node.parent is not None
        assert node.parent.children[node.token] is node
        assert trie.root.weight >= node.parent.weight >= node.weight > 0
        assert len(node.children) <= trie.limits.children
        path = [above.token for above in node.path_from(trie.root)]
        assert node.digest == digests.of((*trie.tokens, *path))
        assert node.end == trie.position + len(path)
    offer = trie.select(len(trie))
    assert len(offer.nodes) == len(trie)
    assert all(parent < i for i, parent in enumerate(offer.parents))
