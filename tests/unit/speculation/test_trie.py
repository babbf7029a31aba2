from dataclasses import replace

import pytest

from speculation import digest as digests
from speculation.messages import ANCHOR, SUPPORT_TOTAL, Proposal, SessionId, Source, Support
from speculation.trie import InsertResult, SpeculationTrie, TrieLimits

PROMPT = (1, 2, 3)


def added(trie: SpeculationTrie, proposal: Proposal) -> int:
    before = len(trie)
    trie.insert(proposal)
    return len(trie) - before


def trie(**limits: int) -> SpeculationTrie:
    return SpeculationTrie(PROMPT, vocabulary=100, limits=TrieLimits(**limits), odds=lambda node: node.claim)


def propose(prefix, tokens, parents=None, confidence=()) -> Proposal:
    chain = tuple(range(ANCHOR, len(tokens) - 1))
    return Proposal(
        SessionId(1), 1, len(prefix), digests.of(prefix), tuple(tokens), tuple(parents or chain), tuple(confidence)
    )


def test_a_chain_is_offered_in_order_and_survives_as_far_as_it_was_right():
    t = trie()
    assert added(t, propose(PROMPT, [4, 5, 6])) == 3
    tree = t.select(8)
    assert tree.tokens == (4, 5, 6)
    assert tree.parents == (ANCHOR, 0, 1)
    t.advance([4, 5])
    t.validate()
    assert t.tokens == [1, 2, 3, 4, 5]
    assert t.select(8).tokens == (6,)
    t.advance([7])
    assert len(t) == 0
    assert t.digest == digests.of([1, 2, 3, 4, 5, 7])


def test_whether_a_drawn_token_is_taken_does_not_depend_on_it():
    q = Support((4, 100), (SUPPORT_TOTAL // 2, SUPPORT_TOTAL // 2))
    for token in q.tokens:
        assert trie().insert(replace(propose(PROMPT, [token]), q=(q,))) is InsertResult.INVALID_TOKEN


def test_a_tree_is_selected_best_first_with_parents_before_children():
    t = trie()
    t.insert(propose(PROMPT, [4, 5, 6, 7], [ANCHOR, ANCHOR, 0, 1], [0.6, 0.4, 0.5, 0.9]))
    tree = t.select(3)
    assert tree.tokens == (4, 5, 7)  # path odds 0.6, 0.4, 0.36 beat 0.3
    assert tree.parents == (ANCHOR, ANCHOR, 1)
    assert t.select(8, depth=1).tokens == (4, 5)


def test_the_chain_of_an_offer_follows_the_best_child_of_each_place():
    t = trie()
    t.insert(propose(PROMPT, [4, 5, 6, 7, 8], [ANCHOR, ANCHOR, 0, 0, 2], [0.6, 0.4, 0.5, 0.3, 0.9]))
    tree = t.select(5)
    assert tree.branched
    assert tree.chain().tokens == (4, 6, 8)
    assert tree.chain().parents == (ANCHOR, 0, 1)
    assert not tree.chain().branched
    assert t.select(1).chain() == t.select(1)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: setattr(t.root.children[4], "weight", 2.0), "has the weight 2.0"),
        (lambda t: setattr(t.root.children[4], "end", 9), "token 4 at 3 says that it is elsewhere"),
        (lambda t: setattr(t.root.children[4], "digest", 9), "token 4 at 3 says that it is elsewhere"),
        (lambda t: setattr(t.root.children[4].children[5], "parent", t.root), "token 5 at 4 hangs from elsewhere"),
        (lambda t: t.root.children.update({7: t.root.children[4]}), "token 7 at 3 hangs from elsewhere"),
        (lambda t: t.root.children.pop(4), "3 nodes, 1 below the root"),
        (lambda t: setattr(t.root, "parent", t.root.children[4]), "the root hangs from what was before"),
        (lambda t: t._tokens.append(9), "the digest is not that of the committed tokens"),
        (lambda t: setattr(t, "limits", TrieLimits(nodes=1)), "2 draft tokens, 1 are allowed"),
        (lambda t: setattr(t, "limits", TrieLimits(depth=1)), "a draft is 2 tokens deep"),
    ],
)
def test_a_trie_that_contradicts_itself_says_how(spoil, words):
    t = trie()
    t.insert(propose(PROMPT, [4, 5]))
    t.validate()
    spoil(t)
    with pytest.raises(AssertionError, match=words):
        t.validate()


def test_insertion_is_idempotent_and_merges_branches():
    t = trie()
    t.insert(propose(PROMPT, [4, 5]))
    again = t.insert(propose(PROMPT, [4, 5]))
    assert again is InsertResult.STALE
    assert added(t, propose(PROMPT, [4, 6])) == 1
    assert len(t) == 3


def test_a_proposal_may_hang_from_a_proposed_token():
    t = trie()
    t.insert(propose(PROMPT, [4, 5]))
    assert added(t, propose((*PROMPT, 4, 5), [6])) == 1
    assert t.lead == 3


def test_a_late_proposal_is_followed_through_what_was_committed():
    t = trie()
    t.advance([4, 5])
    placed = t.insert(propose(PROMPT, [4, 5, 6, 7]))
    assert placed is InsertResult.PLACED and len(t) == 2
    assert t.select(8).tokens == (6, 7)
    assert t.insert(propose(PROMPT, [4, 9, 8])) is InsertResult.STALE


@pytest.mark.parametrize("digest", [0, digests.of(PROMPT)])
def test_what_hangs_from_before_the_opening_is_not_taken_whether_the_digest_was_told_or_not(digest):
    t = SpeculationTrie(PROMPT, vocabulary=100, odds=lambda node: node.claim, digest=digest)
    t.advance([4, 5])
    assert t.insert(propose(PROMPT[:-1], [PROMPT[-1], 4, 5, 6])) is InsertResult.CONFLICT
    assert t.insert(propose((*PROMPT, 4), [5, 6])) is InsertResult.PLACED
    assert t.insert(propose((*PROMPT, 9), [6])) is InsertResult.CONFLICT
    t.validate()


@pytest.mark.parametrize(
    ("proposal", "result"),
    [
        (propose((1, 2, 9), [4]), InsertResult.CONFLICT),
        (propose((1, 9), [4]), InsertResult.CONFLICT),
        (propose((*PROMPT, 8, 8), [4]), InsertResult.UNKNOWN_ANCHOR),
        (propose(PROMPT, [4, 100]), InsertResult.INVALID_TOKEN),
        (propose(PROMPT, []), InsertResult.STALE),
    ],
)
def test_what_cannot_be_placed_is_named_and_changes_nothing(proposal, result):
    t = trie()
    assert t.insert(proposal) is result
    assert len(t) == 0


def test_what_an_elder_sibling_is_sure_of_is_not_there_for_the_younger():
    t = trie()
    first, second, third = (t.add(t.root, token, confidence) for token, confidence in ((4, 0.6), (5, 0.3), (6, 0.1)))
    assert first is not None and second is not None and third is not None
    assert [first.claim, second.claim, third.claim] == pytest.approx([0.6, 0.75, 1.0])
    assert [first.odds, second.odds, third.odds] == pytest.approx([0.6, 0.3, 0.1])


def test_a_sibling_gets_its_share_of_what_is_believed_to_be_left_not_of_what_is_claimed():
    """Nobody believes the first choice; the second is right two times in three where the first is not."""
    t = SpeculationTrie(PROMPT, vocabulary=100, odds=lambda node: 2 / 3 if node.rank else 0.1)
    t.insert(propose(PROMPT, [4, 5, 6], [ANCHOR, ANCHOR, 1], [0.95, 0.01, 0.95]))
    second = t.root.children[5]
    assert second.claim == pytest.approx(0.2)
    assert second.odds == pytest.approx(0.9 * 2 / 3)
    assert second.children[6].weight == pytest.approx(0.9 * 2 / 3 * 0.1)
    assert t.select(8).tokens[0] == 5


def test_a_claim_is_about_the_siblings_of_the_same_source_only():
    t = trie()
    t.add(t.root, 4, 0.6, Source.LOOKUP)
    drafted = t.add(t.root, 5, 0.5)
    assert drafted is not None
    assert drafted.claim == 0.5
    assert drafted.odds == pytest.approx(0.4 * 0.5)


def test_confidences_that_add_up_to_more_than_one_claim_no_more_than_all():
    t = trie()
    for token, confidence in ((4, 0.9), (5, 0.8), (6, 1.0)):
        t.add(t.root, token, confidence)
    children = list(t.root.children.values())
    assert [child.claim for child in children] == [0.9, 1.0, 1.0]
    assert all(child.odds > 0 for child in children)
    assert sum(child.odds for child in children) == pytest.approx(1.0, abs=1e-5)


def test_limits_cut_without_losing_what_fits():
    t = trie(nodes=4, depth=2, children=2)
    assert added(t, propose(PROMPT, [4, 5, 6])) == 2
    assert added(t, propose(PROMPT, [7, 8, 9], [ANCHOR] * 3)) == 1
    assert added(t, propose((*PROMPT, 4), [9, 10], [ANCHOR] * 2)) == 1
    assert t.insert(propose((*PROMPT, 7), [9])) is InsertResult.CUT


def test_proposals_with_impossible_parents_cannot_be_built():
    with pytest.raises(ValueError, match=r"parents\[1\] is 1"):
        propose(PROMPT, [4, 5], [ANCHOR, 1])
    with pytest.raises(ValueError, match="confidence has 1 entries for 2 tokens"):
        propose(PROMPT, [4, 5], confidence=[0.5])
