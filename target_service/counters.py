"""What a target worker counts: monotone totals since its start, told with every heartbeat."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from speculation.messages import Source, SourceName
from speculation.sources.registry import registered
from speculation.sources.suffix import SuffixStore
from speculation.trie import InsertResult, VerificationTree
from speculation.verifying.target_session import Commit


def _by_source() -> dict[SourceName, int]:
    return dict.fromkeys((*Source, *registered()), 0)


@dataclass(slots=True)
class TargetCounters:
    """All of them."""

    steps: int = 0
    step_microseconds: int = 0
    forward_microseconds: int = 0
    waits: int = 0
    """Steps put off because drafts were expected."""
    wait_microseconds: int = 0
    prefilled: int = 0
    reused: int = 0
    """Tokens taken over from the cache instead of being computed."""
    committed: int = 0
    offered: int = 0
    accepted: int = 0
    preempted: int = 0
    grammar_waits: int = 0
    """Steps that sessions sat out since their callers' grammars had taken too long."""
    refused: int = 0
    proposals: dict[InsertResult, int] = field(default_factory=lambda: dict.fromkeys(InsertResult, 0))
    source_faults: int = 0
    """Sessions in which a registered draft source failed."""
    draft_microseconds: int = 0
    """What a draft model in this process took to draft, as part of the steps."""
    draft_left_out: int = 0
    """Times a session found no room in its cache, or has text that it cannot read, ..."""
    draft_faults: int = 0
    """... and sessions that go on without it since it failed."""
    suffix_asked: int = 0
    """How often a session asked how its text went on in earlier outputs, ..."""
    suffix_found: int = 0
    """... and how often that was known."""
    suffix_indexed: int = 0
    """Tokens of outputs taken into the index, ..."""
    suffix_forgotten: int = 0
    """... and taken out again."""
    features: int = 0
    """Tokens of which features were sent to drafters, ..."""
    features_refused: int = 0
    """... and times they were wanted for another head, or of no session here."""
    offered_from: dict[SourceName, int] = field(default_factory=_by_source)
    accepted_from: dict[SourceName, int] = field(default_factory=_by_source)

    def count(self, tree: VerificationTree, commit: Commit) -> None:
        """Add what a session's step came to; each draft source gets its own credit."""
        self.committed += len(commit.verification.tokens)
        self.offered += len(tree.nodes)
        self.accepted += len(commit.kept)
        for node in tree.nodes:
            self.offered_from[node.source] += 1
        for i in commit.kept:
            self.accepted_from[tree.nodes[i].source] += 1

    def take(self, store: SuffixStore) -> None:
        """Take over what is counted there."""
        self.suffix_asked, self.suffix_found = store.asked, store.found
        self.suffix_indexed, self.suffix_forgotten = store.taken, store.forgotten

    def flat(self) -> dict[str, int]:
        """By name."""
        totals: dict[str, int] = {}
        for name, value in asdict(self).items():
            parts = (
                {name: value} if isinstance(value, int) else {f"{name}_{key}": count for key, count in value.items()}
            )
            totals |= parts
        return totals
