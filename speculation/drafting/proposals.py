"""How drafts of a session go to its target: as few proposals as are cheap, and what these cost on the wire."""

from __future__ import annotations

from collections.abc import Sequence

from speculation.messages import ANCHOR, Open, Proposal, Token
from speculation.trie import Node

PROPOSAL_BYTES = 26
"""What a proposal costs on the wire, besides its nodes."""


def proposals_of(opened: Open, root: Node, nodes: Sequence[Node], took_us: int = 0) -> list[Proposal]:
    """New ``nodes``, parents first: one proposal for each place they hang from, or one that spans them all.

    The latter repeats the known nodes between, which does no harm, and is cheaper unless there are many. ``root``: of
    the session's trie. ``took_us``: what drafting them took.
    """
    parts: dict[Node, list[Node]] = {}
    anchors: dict[Node, Node] = {}
    for node in nodes:
        anchors[node] = anchors.get(node.above, node.above)
        parts.setdefault(anchors[node], []).append(node)
    # The deepest place above all of them, and everything between it and the nodes.
    paths = [anchor.path_from(root) for anchor in parts]
    shared = 0
    while all(len(path) > shared and path[shared] is paths[0][shared] for path in paths):
        shared += 1
    common = paths[0][shared - 1] if shared else root
    between = {node: None for path in paths for node in path[shared:]} | dict.fromkeys(nodes)
    spanning = sorted(between, key=lambda node: node.end)
    if sum(token_bytes(node.token) for node in spanning if node not in anchors) <= PROPOSAL_BYTES * (len(parts) - 1):
        return [_proposal(opened, common, spanning, took_us)]
    return [_proposal(opened, anchor, part, took_us) for anchor, part in parts.items()]


def proposal_bytes(proposal: Proposal) -> int:
    """What a proposal costs on the wire."""
    return PROPOSAL_BYTES + sum(map(token_bytes, proposal.tokens))


def token_bytes(token: Token) -> int:
    """What a draft token costs on the wire: itself as a varint, its parent, its confidence."""
    return (token.bit_length() + 6) // 7 + 2


def _proposal(opened: Open, anchor: Node, nodes: Sequence[Node], took_us: int) -> Proposal:
    index = {node: i for i, node in enumerate(nodes)}
    return Proposal(
        session=opened.session,
        epoch=opened.epoch,
        anchor_position=anchor.end,
        anchor_digest=anchor.digest,
        tokens=tuple(node.token for node in nodes),
        parents=tuple(ANCHOR if node.parent is anchor else index[node.above] for node in nodes),
        confidence=tuple(node.confidence for node in nodes),
        q=tuple(node.q for node in nodes if node.q is not None),
        took_us=took_us,
    )
