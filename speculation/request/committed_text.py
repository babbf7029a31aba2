"""The committed text of a session, and what of a verification is new to it.

Only what connects is committed: a verification that starts beyond the end, or whose digest is not that of the text with
its tokens, says of another text. So nothing is ever retracted or doubled.
"""

from __future__ import annotations

from speculation import digest as digests
from speculation.events import Emit, StepMetadata
from speculation.messages import Token, Verification


class CommittedText:
    """All tokens of a session that are decided, the prompt included."""

    def __init__(self, prompt: tuple[Token, ...]) -> None:
        """Nothing was generated yet."""
        assert prompt, "a session has at least one token"
        self.prompt_length = len(prompt)
        self.tokens = list(prompt)
        self._digest = digests.of(prompt)

    @property
    def begun(self) -> bool:
        """Whether anything was generated."""
        return len(self.tokens) > self.prompt_length

    @property
    def output(self) -> tuple[Token, ...]:
        """Tokens after the prompt."""
        return tuple(self.tokens[self.prompt_length :])

    def has(self, verification: Verification) -> bool:
        """Whether nothing that it says is new."""
        return len(self.tokens) - verification.position >= len(verification.tokens)

    def commit(self, verification: Verification) -> Emit | None:
        """Take over what is new and return what to say of it; None, and nothing is taken, if it does not connect."""
        known = len(self.tokens) - verification.position
        fresh = verification.tokens[max(known, 0) :]
        digest = self._digest
        for token in fresh:
            digest = digests.extend(digest, token)
        if known < 0 or digest != verification.digest:
            return None
        first = not self.begun
        self.tokens.extend(fresh)
        self._digest = digest
        accepted, cached = max(verification.accepted - known, 0), verification.cached if first else 0
        offered = verification.offered - verification.accepted + accepted
        return Emit(fresh, accepted, offered, cached, _metadata_of(verification, known, first=first))

    def validate(self) -> None:
        """Assert that the digest is that of the tokens."""
        assert len(self.tokens) >= self.prompt_length, "a part of the prompt is missing"
        assert self._digest == digests.of(self.tokens), f"the digest is not that of the {len(self.tokens)} tokens"


def _metadata_of(verification: Verification, known: int, *, first: bool) -> StepMetadata:
    """What is said of all but the first ``known`` tokens. Only the first one of a session speaks of its prompt."""
    return StepMetadata(
        sources=verification.sources[known:],
        refused=verification.refused,
        recovered=verification.recovered,
        logprobs=verification.logprobs[known:],
        prompt_logprobs=verification.prompt_logprobs if first else (),
        took_us=verification.took_us,
        waited_us=verification.waited_us,
    )
