"""One session's part of a step: what the engine computes for it, and how its rows are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from engine.interface import Chunk
from engine.sampling.draws import is_plain
from engine.sampling.sampling import Draw
from engine.shaping.shaping import RowShaping
from speculation.acceptance import Chosen, Draft, Sampled
from speculation.messages import ANCHOR, Rule, Sampling, Token
from speculation.trie import VerificationTree
from speculation.verifying.target_session import Commit
from target_service.scheduler import Share
from target_service.sequence import TargetSequence


@dataclass(slots=True)
class BatchEntry:
    """Tokens to feed, then the drafts offered behind them."""

    sequence: TargetSequence
    num_scheduled_tokens: int
    drafts: int | None
    """Room for drafts; None while the prompt is not complete: then nothing is drawn."""
    tree: VerificationTree | None = None
    outcome: dict[str, object] | None = None
    """For the record."""

    @classmethod
    def of(cls, sequence: TargetSequence, share: Share) -> BatchEntry:
        """What a session does with its share of a step."""
        return cls(
            sequence,
            share.num_scheduled_tokens,
            share.drafts if share.num_scheduled_tokens == sequence.num_uncomputed_tokens else None,
        )

    @property
    def tokens(self) -> int:
        """How many are computed."""
        return self.num_scheduled_tokens if self.tree is None else self.num_scheduled_tokens + len(self.tree.nodes)

    @property
    def rows(self) -> int:
        """How many rows are judged: one for every token to draw.

        Of a part of a prompt it is the last one, which sees all others, if others might read across them.
        """
        return int(self.sequence.cached.among_others) if self.tree is None else len(self.tree.nodes) + 1

    @property
    def prompt_logprob_rows(self) -> range:
        """Which of the tokens to feed have rows that say how likely the prompt's next token was, and are asked for."""
        missing, start = self.sequence.missing_prompt_logprobs, self.sequence.cached.length
        if not missing:
            return missing
        return range(max(missing.start - 1 - start, 0), min(missing.stop - 1 - start, self.num_scheduled_tokens))

    @property
    def decodes(self) -> bool:
        """Whether the session is past its prompt, so that the entry computes nothing but its next tokens."""
        return self.num_scheduled_tokens == 1 and self.tree is not None

    @property
    def by_rejection(self) -> bool:
        """Whether drafts are accepted by the rejection rule. Without randomness both rules come to the same."""
        opened = self.sequence.session.opened
        return opened.speculation.rule is Rule.REJECTION and not opened.sampling.greedy

    @property
    def is_plain(self) -> bool:
        """Whether all its rows are drawn by nothing but a temperature and noise, and none tells of the prompt."""
        plain = self.sequence.shaping is None and is_plain(self.sequence.session.opened.sampling)
        return plain and not self.by_rejection and not self.prompt_logprob_rows

    def chunk(self, *, draws: bool = False) -> Chunk:
        """What the engine computes: a chain of scheduled tokens, the offered tree hanging from its end.

        The rows that tell of the prompt come first. ``draws``: let the step draw; the entry has to be plain. A row that
        is computed only to be judged is drawn as if greedy.
        """
        start = self.sequence.cached.length
        scheduled = self.sequence.session.tokens[start : start + self.num_scheduled_tokens]
        last = self.num_scheduled_tokens - 1
        chain = range(ANCHOR, last)
        if self.tree is None:
            judged = [Draw(Sampling(temperature=0.0), 0)] * self.rows if draws else []
            return Chunk(
                self.sequence.cached, scheduled, list(chain), [*self.prompt_logprob_rows, *[last] * self.rows], judged
            )
        parents = [
            *chain,
            *(last if parent == ANCHOR else self.num_scheduled_tokens + parent for parent in self.tree.parents),
        ]
        rows = [*self.prompt_logprob_rows, *range(last, self.num_scheduled_tokens + len(self.tree.nodes))]
        return Chunk(
            self.sequence.cached, [*scheduled, *self.tree.tokens], parents, rows, self.draws() if draws else ()
        )

    def verifies(self, tree: VerificationTree | None, now: float) -> None:
        """These drafts; None: it waits for some, and sits this step out."""
        self.tree = tree
        if tree is None and self.sequence.waits_since is None:
            self.sequence.waits_since = now

    def withdraw(self) -> bool:
        """Verify no drafts after all; whether there were any."""
        if self.tree is None or not self.tree.nodes:
            return False
        self.tree = self.sequence.session.withdraw()
        return True

    def draws(self) -> list[Draw]:
        """How each wanted row is drawn: after the last scheduled token, then after each draft."""
        if self.tree is None:
            return []
        session = self.sequence.session
        positions = [session.trie.position, *(node.end for node in self.tree.nodes)]
        return [Draw(session.opened.sampling, position) for position in positions]

    def shapes(self) -> list[RowShaping | None]:
        """How each wanted row is shaped before it is drawn from; None: not at all."""
        shaping = self.sequence.shaping
        if self.tree is None or shaping is None:
            return [None] * self.rows
        paths: list[tuple[Token, ...]] = [()]
        for token, parent in zip(self.tree.tokens, self.tree.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        return [shaping.after(path) for path in paths]

    def drafts_with_q(self) -> list[Draft]:
        """The tree, a chain, as the rejection rule takes it."""
        assert self.tree is not None
        return [Chosen(node.token) if node.q is None else Sampled(node.token, node.q) for node in self.tree.nodes]

    def record(self, commit: Commit) -> None:
        """Note for the recorder what came of it."""
        assert self.tree is not None
        verification = commit.verification
        self.outcome = {
            "session": verification.session,
            "position": verification.position,
            "feed": self.num_scheduled_tokens,
            "offered": verification.offered,
            "accepted": verification.accepted,
            "committed": len(verification.tokens),
            "depths": [node.end - verification.position for node in self.tree.nodes],
            "parents": list(self.tree.parents),
            "odds": [round(node.weight, 4) for node in self.tree.nodes],
            "kept": list(commit.kept),
        }
