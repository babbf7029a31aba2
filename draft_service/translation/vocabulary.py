"""Which tokens of the target's vocabulary are tokens of the draft model's, too: its *own* tokens.

Two tokens are the same if they stand for the same bytes. Special ones are the same if they are written alike; failing
that, if they have the same role. What the draft model proposes is of shared tokens only, as in the token-level
intersection of Timor et al. 2025 ("Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies"). But where it would say a token of its own alone, the target most likely begins with the
longest shared token that this one begins with: so the one's probability counts for the other, instead of being lost.
What the draft model reads is text, and need not be shared.
"""

from __future__ import annotations

from draft_service.translation.tokenizer import ROLES, DraftTokenizer
from engine.model import ModelError
from speculation.messages import Token

MIN_SHARED = 0.02
"""Share of the target's vocabulary that must be shared. Most of it is rarely said, so a small share may be of use."""


class SharedVocabulary:
    """The map from the target's tokens to own ones."""

    def __init__(self, target: DraftTokenizer, own: DraftTokenizer, *, target_size: int, own_size: int) -> None:
        """Ids from ``target_size`` and ``own_size`` on are not used.

        Raises :class:`ModelError` if too little is shared.
        """
        self.target, self.own = target, own
        self.size = min(target_size, target.size)
        """The target's token ids are below this."""
        self.special = _special_pairs(target, own, own_size)
        """Special tokens of the target, and what the draft model reads in their place; any other it does not read."""
        said = {
            token: mine
            for token, mine in self.special.items()
            if (target.special[token] & own.special[mine]) - {"bos_token"}  # no text goes on with a beginning
        }
        plain = {token: own.by_bytes.get(spelt) for spelt, token in target.by_bytes.items()}
        said |= {token: mine for token, mine in plain.items() if mine is not None and mine < own_size}
        self.own_of = {token: mine for token, mine in sorted(said.items()) if token < self.size}
        """The shared tokens, by the target's ids."""
        self.begins = self._beginnings(own_size)
        """For own tokens, the longest shared token that they begin with, by the target's ids; themselves, if shared."""
        single = [own.by_bytes.get(bytes([byte]), own_size) for byte in range(256)]
        self.own_bytes = single if max(single) < own_size else None
        """The own token of each single byte; None: some have none."""
        total = len(target.by_bytes)
        self.share = sum(target.bytes_of[token] is not None for token in self.own_of) / max(total, 1)
        """How much of the target's vocabulary, special tokens left out, is shared."""
        if self.share < MIN_SHARED:
            raise ModelError(
                f"{own.name} shares {len(self.own_of)} of {total} tokens with the target's tokenizer, "
                f"{self.share:.1%}; at least {MIN_SHARED:.0%} are needed to draft, choose a draft model nearer to it"
            )

    def _beginnings(self, own_size: int) -> dict[Token, Token]:
        begins = {mine: token for token, mine in self.own_of.items() if self.target.bytes_of[token] is None}
        by_bytes = {spelt: token for token in self.own_of if (spelt := self.target.bytes_of[token])}
        for mine in range(min(own_size, self.own.size)):
            spelt = self.own.bytes_of[mine] or b""
            cut = (by_bytes.get(spelt[:end]) for end in range(len(spelt), 0, -1))
            found = next((token for token in cut if token is not None), None)
            if found is not None:
                begins[mine] = found
        return begins


def _special_pairs(target: DraftTokenizer, own: DraftTokenizer, own_size: int) -> dict[Token, Token]:
    by_name = {name: token for token, names in own.special.items() if token < own_size for name in names}
    pairs: dict[Token, Token] = {}
    for token, names in target.special.items():
        # The token as it is written comes before its roles.
        wanted = sorted(names, key=lambda name: ROLES.index(name) if name in ROLES else -1)
        found = next((by_name[name] for name in wanted if name in by_name), None)
        if found is not None:
            pairs[token] = found
    return pairs
