"""What the tokens of a tokenizer stand for, and which of its tokens spell a text.

Ordinary tokens stand for bytes, however a tokenizer writes them: in the characters of byte-level BPE, with
SentencePiece's underline for a space, or as ``<0xE2>``. Special tokens stand for no bytes; they are known by how they
are written, and by their role.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.loading.checkpoint import digest_of, read_tokenizer, tokens_of
from engine.model import ModelError
from speculation.messages import Token

ROLES = ("eos_token", "bos_token")
"""Roles of special tokens that mean the same in every tokenizer."""
_SPACE = "\u2581"
"""How SentencePiece writes a space."""
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
BYTE_OF: dict[str, int] = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
"""Byte of each character of byte-level BPE."""


class DraftTokenizer:
    """A tokenizer as a translator needs it. Token ids are below ``size``."""

    def __init__(
        self,
        name: str,
        backend: tokenizers.Tokenizer,
        roles: Mapping[str, str] | None = None,
        size: int | None = None,
    ) -> None:
        """``roles``: special tokens by role; ``size``: of the model's vocabulary, if not all tokens are in it.

        Raises :class:`ModelError` if the tokens cannot be read as bytes.
        """
        self.name = name
        plain: list[Token] = backend.encode("a", add_special_tokens=False).ids
        whole: list[Token] = backend.encode("a", add_special_tokens=True).ids
        starts = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        self.beginning = whole[: next(starts, 0)]
        """What it puts before a text."""
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.post_processor = None  # it may move the offsets
        self._backend.encode_special_tokens = True  # "</s>" in a text is text
        known = self._backend.get_vocab()
        self.size = size or max(known.values(), default=-1) + 1
        self.special = _special(self._backend, roles or {})
        """Names and roles of each special token."""
        self.fallback: set[Token] = set()
        """Tokens for single bytes of characters that have no token."""
        self.bytes_of: list[bytes | None] = [None] * self.size
        """By token; None: it is special, or no token at all."""
        self._read({piece: token for piece, token in known.items() if token < self.size})
        self.by_bytes: dict[bytes, Token] = {}
        """The token that stands for some bytes: an ordinary one, if there is one."""
        for token in sorted(range(self.size), key=lambda token: token in self.fallback):
            if spelt := self.bytes_of[token]:
                self.by_bytes.setdefault(spelt, token)
        self.prefixes = b"".join(self.bytes_of[token] or b"" for token in self.encode("a")[0]) != b"a"
        """Whether it puts something, such as a space, before a text that it encodes."""

    @classmethod
    def load(cls, path: str) -> tuple[DraftTokenizer, int]:
        """The tokenizer of a folder or hub id, and the digest of its id-to-token map. Raises :class:`ModelError`."""
        tokenizer = read_tokenizer(path)
        tokens = tokens_of(path, tokenizer)
        if not tokens:
            raise ModelError(f"{path}: has no tokenizer; give a folder that has the files of one")
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ModelError(f"{path}: its tokenizer has no tokenizer.json, which translating needs")
        roles = {role: str(token) for role, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        size = max(tokens.values()) + 1  # transformers may have appended some
        return cls(path, tokenizer.backend_tokenizer, roles, size), digest_of(tokens)

    def encode(self, text: str) -> tuple[list[Token], list[tuple[int, int]]]:
        """The tokens of a text alone, and of which characters each is (a character may need several)."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, tokens: Sequence[Token]) -> str:
        """The text of some tokens."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=True))

    def _read(self, known: Mapping[str, Token]) -> None:
        decoder = self._backend.decoder
        kinds = set(_types(json.loads(decoder.__getstate__()) if decoder else {}))
        if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
            listed = ", ".join(sorted(kinds - {""})) or "none"
            raise ModelError(
                f"{self.name}: its tokens cannot be read as bytes (decoder: {listed}); "
                "the tokenizer must be a byte-level or a SentencePiece one"
            )
        added = self._backend.get_added_tokens_decoder()
        for piece, token in known.items():
            if token in self.special:
                continue
            if token in added:
                self.bytes_of[token] = piece.encode()
            elif "ByteLevel" in kinds and all(character in BYTE_OF for character in piece):
                self.bytes_of[token] = bytes(BYTE_OF[character] for character in piece)
            elif "ByteFallback" in kinds and (match := _BYTE.fullmatch(piece)):
                self.bytes_of[token] = bytes.fromhex(match[1])
                self.fallback.add(token)
            else:
                self.bytes_of[token] = piece.replace(_SPACE, " ").encode()


def _special(backend: tokenizers.Tokenizer, roles: Mapping[str, str]) -> dict[Token, frozenset[str]]:
    names: dict[Token, set[str]] = {
        token: {added.content} for token, added in backend.get_added_tokens_decoder().items() if added.special
    }
    for role in ROLES:
        token = backend.token_to_id(roles[role]) if role in roles else None
        if token is not None:
            names.setdefault(token, {roles[role]}).add(role)
    return {token: frozenset(found) for token, found in names.items()}


def _types(decoder: Mapping[str, Any]) -> Iterator[str]:
    """The kinds of decoders that a tokenizer's decoder is made of."""
    yield str(decoder.get("type", ""))
    for inner in decoder.get("decoders", ()):
        yield from _types(inner)


MIN_SHARED = 0.02
"""Share of the target's vocabulary that must be shared. Most of it is rarely said, so a small share may be of use."""


class SharedVocabulary:
    """Which tokens of the target's vocabulary are tokens of the draft model's, too: its *own* tokens.

    Two tokens are the same if they stand for the same bytes. Special ones are the same if they are written alike;
    failing that, if they have the same role. What the draft model proposes is of shared tokens only, as in the
    token-level intersection of Timor et al. 2025 ("Accelerating LLM Inference with Lossless Speculative Decoding
    Algorithms for Heterogeneous Vocabularies"). But where it would say a token of its own alone, the target most likely
    begins with the longest shared token that this one begins with: so the one's probability counts for the other,
    instead of being lost. What the draft model reads is text, and need not be shared.
    """

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
