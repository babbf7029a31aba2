"""In which messages new drafts go out: those that take the fewest bytes on the wire.

Decides how drafts are put together, not which are sent (:mod:`speculation.drafting.draft_session`).
"""

from __future__ import annotations

from collections.abc import Sequence

from speculation.messages import ANCHOR, Open, Proposal, Token
from speculation.trie import Node

PROPOSAL_BYTES = 26
"""What a proposal costs on the wire, besides its nodes."""


def proposals_of(opened: Open, root: Node, nodes: Sequence[Node]) -> list[Proposal]:
    """New ``nodes``, parents first: one proposal for each place they hang from, or one that spans them all.

    The latter repeats the known nodes between, which does no harm, and is cheaper unless there are many. ``root``: of
    the session's trie.
    """
    unsent = set(nodes)
    parts: dict[Node, list[Node]] = {}
    anchors: dict[Node, Node] = {}
    for node in nodes:
        above = parent_of(node)
        anchors[node] = anchor = anchors[above] if above in unsent else above
        parts.setdefault(anchor, []).append(node)
    common, spanning = _span(root, list(parts), nodes)
    repeated = sum(token_bytes(node.token) for node in spanning if node not in unsent)
    if repeated <= PROPOSAL_BYTES * (len(parts) - 1):
        return [_proposal(opened, common, spanning)]
    return [_proposal(opened, anchor, part) for anchor, part in parts.items()]


def proposal_bytes(proposal: Proposal) -> int:
    """What a proposal costs on the wire."""
    return PROPOSAL_BYTES + sum(map(token_bytes, proposal.tokens))


def token_bytes(token: Token) -> int:
    """What a draft token costs on the wire: itself as a varint, its parent, its confidence."""
    return (token.bit_length() + 6) // 7 + 2


def parent_of(node: Node) -> Node:
    """Of a draft, which hangs from something."""
    assert node.parent is not None
    return node.parent


def _span(root: Node, anchors: Sequence[Node], nodes: Sequence[Node]) -> tuple[Node, list[Node]]:
    """The deepest place above all ``anchors``, and everything between it and ``nodes``, parents first."""
    paths = [anchor.path_from(root) for anchor in anchors]
    shared = 0
    while all(len(path) > shared and path[shared] is paths[0][shared] for path in paths):
        shared += 1
    common = paths[0][shared - 1] if shared else root
    between = {node: None for path in paths for node in path[shared:]} | dict.fromkeys(nodes)
    return common, sorted(between, key=lambda node: node.end)


def _proposal(opened: Open, anchor: Node, nodes: Sequence[Node]) -> Proposal:
    index = {node: i for i, node in enumerate(nodes)}
    return Proposal(
        session=opened.session,
        epoch=opened.epoch,
        anchor_position=anchor.end,
        anchor_digest=anchor.digest,
        tokens=tuple(node.token for node in nodes),
        parents=tuple(ANCHOR if node.parent is anchor else index[parent_of(node)] for node in nodes),
        confidence=tuple(node.confidence for node in nodes),
        q=tuple(node.q for node in nodes if node.q is not None),
    )
