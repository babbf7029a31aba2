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
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.loading.loader import digest_of, read_tokenizer, tokens_of
from engine.model import ModelError
from speculation.messages import Token

ROLES = ("eos_token", "bos_token")
"""Roles of special tokens that mean the same in every tokenizer."""
_SPACE = "\u2581"
"""How SentencePiece writes a space."""
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_level() -> dict[str, int]:
    """Byte of each character of byte-level BPE: printable ones stand for themselves, the others follow in order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = {character: ord(character) for character in alphabet if ord(character) < 256}
    others = (byte for byte in range(256) if byte not in plain.values())
    return plain | dict(zip((character for character in alphabet if character not in plain), others, strict=True))


BYTE_OF = _byte_level()


class DraftTokenizer:
    """A tokenizer as a translator needs it. Token ids are below ``size``."""

    def __init__(self, name: str, backend: tokenizers.Tokenizer, roles: Mapping[str, str] | None = None) -> None:
        """``roles``: special tokens by role. Raises :class:`ModelError` if the tokens cannot be read as bytes."""
        self.name = name
        self.beginning = _beginning(backend)
        """What it puts before a text."""
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.post_processor = None  # it may move the offsets
        self._backend.encode_special_tokens = True  # "</s>" in a text is text
        known = self._backend.get_vocab()
        self.size = max(known.values(), default=-1) + 1
        self.special = _special(self._backend, roles or {})
        """Names and roles of each special token."""
        self.fallback: set[Token] = set()
        """Tokens for single bytes of characters that have no token."""
        self.bytes_of: list[bytes | None] = [None] * self.size
        """By token; None: it is special, or no token at all."""
        self._read(known)
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
        digest = digest_of(tokens_of(tokenizer))
        if not digest:
            raise ModelError(f"{path}: has no tokenizer; give a folder that has the files of one")
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ModelError(f"{path}: its tokenizer has no tokenizer.json, which translating needs")
        roles = {role: str(token) for role, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        return cls(path, tokenizer.backend_tokenizer, roles), digest

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


def _beginning(backend: tokenizers.Tokenizer) -> list[Token]:
    plain = backend.encode("a", add_special_tokens=False).ids
    whole: list[Token] = backend.encode("a", add_special_tokens=True).ids
    starts = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return whole[: next(starts, 0)]


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
