"""Text to token ids and back, and the chat template: all that the API needs to know of a model's tokenizer.

Reads ``tokenizer.json`` with the ``tokenizers`` library and the files beside it directly. transformers'
``AutoTokenizer`` reads the same ones, but its import takes seconds and brings torch into the router, which
must run without it.

The tokenizer of each served model is read when it is first needed, and once. Models come and go while a router runs,
and a model may be replaced by one with another tokenizer, even in the same folder; what its targets say of the
tokenizer decides whether the one that was read is right. Where it is read they do not decide: a folder or hub id that
nobody configured is not opened on the word of a worker.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import tokenizers

from router.generation import ServedModel
from router.text.chat_template import SPECIAL_TOKENS, ChatTemplate
from speculation.messages import Token
from transport.background import in_background

TOOL_TEMPLATE = "tool_use"
"""Name that transformers gives a template for chats with tools, where a model has one of its own for them."""
TEMPLATES = {"default": "chat_template.jinja", TOOL_TEMPLATE: f"additional_chat_templates/{TOOL_TEMPLATE}.jinja"}
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    *TEMPLATES.values(),
    "generation_config.json",
    "config.json",
)
"""Everything that is read of a model; the first must exist."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SPACE = "\u2581"
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_TAG = re.compile(r"<[^<>\s\[][^<>\s]*>")


def _byte_level() -> dict[str, int]:
    """How byte-level tokenizers write bytes: printable ones as themselves, the others as characters from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF = _byte_level()


class TokenizerError(Exception):
    """A tokenizer cannot be loaded. The message is one line that names the model."""


class Tokenizer:
    """The tokenizer of one model. Immutable, and safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        stop_tokens: frozenset[Token] = frozenset(),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        """``special_tokens`` maps roles (``bos_token`` ...) to tokens. Raises ``TemplateError``."""
        backend.no_truncation()  # Some files carry a length that was used in training.
        backend.no_padding()
        self._backend = backend
        self.stop_tokens = stop_tokens
        """Tokens that end a text, as the model's configuration gives them."""
        names = special_tokens or {}
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._decoders = frozenset(_types(json.loads(backend.decoder.__getstate__()) if backend.decoder else {}))
        hidden = {token for token, content in added.items() if content.special}
        hidden.update(t for t in map(backend.token_to_id, names.values()) if t is not None)
        self._concatenates = "ByteLevel" in self._decoders and self._decoders <= {"ByteLevel", "Sequence"}
        """Whether a text is the bytes of its tokens, one after the other."""
        self.hidden = frozenset(hidden)
        """Special tokens, which do not show in a text unless they are asked for."""
        marks = [mark for mark in map(backend.id_to_token, hidden) if mark is not None]
        self.chat_template = ChatTemplate(chat_template, names, marks) if chat_template is not None else None
        self.tool_template = ChatTemplate(tool_template, names, marks) if tool_template is not None else None
        """Of its own for chats with tools; None: there is none."""
        self.tags = {content.content: token for token, content in added.items() if _TAG.fullmatch(content.content)}
        """Added tokens that are written ``<...>``. Grammars match them by their names, not by their letters."""
        self._whole: dict[Token, str] = {}
        """See :meth:`whole`; no more than there are tokens."""
        self.longest = max(map(len, backend.get_vocab()), default=1)
        """Characters of the longest token: a text of more than n times as many has more than n tokens."""

    @classmethod
    def load(cls, model: str) -> Self:
        """Read that of a folder, or of a hub's repository (kept where transformers does). Raises TokenizerError."""
        folder = Path(os.path.expanduser(model))
        if not os.path.isdir(folder):
            folder = _download(model)
        path = folder / FILES[0]
        if not path.is_file():
            raise TokenizerError(f"{model}: has no {FILES[0]}; save its tokenizer with transformers to get one")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
            config = _read_json(folder / "tokenizer_config.json")
            templates = _chat_templates(folder, config)
            names = _special_tokens(folder, config)
            return cls(
                backend,
                stop_tokens=_stop_tokens(folder, backend, names),
                special_tokens=names,
                chat_template=templates.get("default"),
                tool_template=templates.get(TOOL_TEMPLATE),
            )
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"{model}: cannot read the tokenizer: {_first_line(error)}") from error

    def template(self, *, tools: bool) -> ChatTemplate | None:
        """What writes a chat in which tools are offered, or none; None: it cannot be written."""
        return (tools and self.tool_template) or self.chat_template

    def encode(self, text: str, *, special: bool) -> tuple[Token, ...]:
        """Token ids of ``text``; with what the tokenizer puts around a text (such as BOS) if ``special``.

        May take seconds for megabytes: then call it in a thread. The batch call is used because, unlike
        ``encode``, it releases the interpreter lock.
        """
        return tuple(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def decode(self, tokens: Sequence[Token], hidden: frozenset[Token] | None = None) -> str:
        """Text of ``tokens`` without the ``hidden`` ones, by default the special ones; broken characters are U+FFFD."""
        hidden = self.hidden if hidden is None else hidden
        shown = [token for token in tokens if token not in hidden]
        return self._backend.decode(shown, skip_special_tokens=False) if shown else ""

    def whole(self, token: Token) -> str:
        """What a token adds to a text wherever whole characters end before it; empty: that depends on its neighbours.

        Known of tokenizers whose text is the bytes of its tokens one after the other, for tokens of whole characters.
        """
        text = self._whole.get(token)
        if text is None:
            text = self._backend.decode([token], skip_special_tokens=False) if self._concatenates else ""
            text = "" if REPLACEMENT in text else text
            if self._backend.id_to_token(token) is not None:
                self._whole[token] = text
        return text

    def visible(self, token: Token, hidden: frozenset[Token]) -> bool:
        """Whether a token is in the vocabulary and shows in the text at all."""
        return token not in hidden and self._backend.id_to_token(token) is not None

    def hidden_token(self, name: str) -> Token | None:
        """The special token of this name; None: there is none."""
        token = self._backend.token_to_id(name)
        return token if token in self.hidden else None

    def spelling(self, token: Token) -> tuple[str, bytes | None]:
        """How one token is written, and the bytes that it adds to a text; None: none (special or no token)."""
        piece = self._backend.id_to_token(token)
        if piece is None:
            return f"token_id:{token}", None
        if token in self.hidden:
            return piece, None
        spelt = self._bytes_of(token, piece)
        try:
            return spelt.decode(), spelt
        except UnicodeDecodeError:  # a part of a character; written as OpenAI writes it
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt), spelt

    def _bytes_of(self, token: Token, piece: str) -> bytes:
        if token in self._added:
            return piece.encode()
        if "ByteLevel" in self._decoders and all(character in BYTE_OF for character in piece):
            return bytes(BYTE_OF[character] for character in piece)
        if "ByteFallback" in self._decoders and (match := _BYTE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        if "ByteFallback" in self._decoders or "Metaspace" in self._decoders:
            return piece.replace(_SPACE, " ").encode()
        return self._backend.decode([token], skip_special_tokens=False).encode()

    @property
    def size(self) -> int:
        """Largest token id plus one."""
        return max(self._backend.get_vocab().values(), default=-1) + 1

    @cached_property
    def digest(self) -> int:
        """64-bit digest of the id-to-token map, as target workers give it in ``Welcome.tokenizer``."""
        digest = hashlib.blake2b(digest_size=8)
        for token, token_id in sorted(self._backend.get_vocab().items(), key=lambda item: (item[1], item[0])):
            digest.update(f"{token_id}\t{token}\n".encode("utf-8", "surrogatepass"))
        return int.from_bytes(digest.digest(), "big")


def _types(decoder: Mapping[str, Any]) -> Iterator[str]:
    yield str(decoder.get("type", ""))
    for inner in decoder.get("decoders", ()):
        yield from _types(inner)


def _download(model: str) -> Path:
    import huggingface_hub  # Only for models that are not on disk.

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(FILES)))
    except Exception as error:  # Bad names, no network, no access: many types, one outcome.
        reason = _first_line(error)
        raise TokenizerError(f"{model}: neither a folder nor available from the hub: {reason}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    raw = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return raw


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Role to token; a token is written as a string or as an object with ``content``.

    In older folders, whose configuration does not list added tokens, the file of these names has the last word, as
    transformers reads them.
    """
    named = config if "added_tokens_decoder" in config else {**config, **_read_json(folder / "special_tokens_map.json")}
    found = {}
    for role in SPECIAL_TOKENS:
        value = named.get(role)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[role] = value
    return found


def _stop_tokens(folder: Path, backend: tokenizers.Tokenizer, names: Mapping[str, str]) -> frozenset[Token]:
    """The union of what the configurations, and ``names`` of special tokens, call end of sequence."""
    stops: set[Token] = set()
    for name in ("generation_config.json", "config.json"):
        said = _read_json(folder / name)
        for part in (said, said.get("text_config")):  # models of images and text keep their text's in there
            value = part.get("eos_token_id") if isinstance(part, dict) else None
            stops.update(value if isinstance(value, list) else [] if value is None else [value])
    if (eos := names.get("eos_token")) is not None:
        token = backend.token_to_id(eos)
        stops.update([] if token is None else [token])
    return frozenset(stops)


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name, as transformers reads them: those of the files if there are any, else those of the configuration."""
    files = {name: folder / file for name, file in TEMPLATES.items()}
    found = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    if found:
        return found
    value = config.get("chat_template")
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return {"default": value} if isinstance(value, str) else {}


RETRY_SECONDS, LONGEST_RETRY_SECONDS = 10.0, 60.0
"""Pause after a tokenizer could not be read, or was read again: every request of a model that it is not would try. Each
time it is twice as long: reading a large one holds up all streams for a moment."""
READ_SECONDS, SILENT_SECONDS = 120.0, 300.0
"""That reading one may take, and pause after it took longer: a hub that takes a connection may never answer."""


class Tokenizers:
    """Of one router. Used from one event loop."""

    def __init__(self, preferred: str = "", configured: Collection[str] | None = None) -> None:
        """``preferred``: folder or hub id to read from where that is a model's tokenizer; else where the model is.

        ``configured``: all others that may be read; None: whatever targets say.
        """
        self._preferred, self._configured = preferred, configured
        self._read: dict[str, tuple[Tokenizer | TokenizerError, float]] = {}
        """By source: what came of reading it, and when it may be read once more."""
        self._pauses: dict[str, float] = {}
        """By source, the last one."""
        self._reading: dict[str, asyncio.Task[Tokenizer | TokenizerError]] = {}
        self._found: dict[tuple[str, int], Tokenizer] = {}
        """By the source and the digest that a model names."""

    async def of(self, model: ServedModel) -> Tokenizer:
        """The one of a model. Raises :class:`TokenizerError`."""
        wanted = model.source, model.tokenizer
        if wanted not in self._found:
            self._found[wanted] = await self._find(model)
        return self._found[wanted]

    async def _find(self, model: ServedModel) -> Tokenizer:
        sources = [source for source in dict.fromkeys((self._preferred, *self._sources_of(model))) if source]
        for source in sources:
            read, again = self._read.get(source, (None, 0.0))
            if not _fits(read, model) and asyncio.get_running_loop().time() >= again:
                read = await self.read(source)
            if isinstance(read, TokenizerError):
                raise read
            if read is not None and _fits(read, model):
                return read
        listed = " or ".join(repr(source) for source in sources) or "no folder"
        raise TokenizerError(f"the tokenizer in {listed} is not that of the served model {model.name}")

    def _sources_of(self, model: ServedModel) -> Collection[str]:
        """Where it may be read: where its targets say, if somebody configured that, else wherever it is found."""
        if self._configured is None or model.source in self._configured:
            return (model.source,)
        return self._configured if model.tokenizer else ()

    async def read(self, source: str) -> Tokenizer:
        """What is in a folder or of a hub id, read once for all who ask meanwhile. Raises :class:`TokenizerError`."""
        if source not in self._reading:
            self._reading[source] = asyncio.create_task(self._load(source))
        read = await asyncio.shield(self._reading[source])  # which goes on without whoever asked
        if isinstance(read, TokenizerError):
            raise read
        return read

    async def _load(self, source: str) -> Tokenizer | TokenizerError:
        read: Tokenizer | TokenizerError
        pause = self._pauses[source] = min(2 * self._pauses.get(source, RETRY_SECONDS / 2), LONGEST_RETRY_SECONDS)
        try:
            async with asyncio.timeout(READ_SECONDS):
                read = await asyncio.wrap_future(in_background(partial(Tokenizer.load, source), "tokenizer"))
        except TimeoutError:
            read = TokenizerError(f"{source}: not read within {READ_SECONDS:g} s; is the hub reachable?")
            pause = SILENT_SECONDS
        except TokenizerError as error:
            read = error
        finally:
            del self._reading[source]
        if isinstance(read, Tokenizer) and isinstance(self._read.get(source, (None,))[0], TokenizerError):
            del self._pauses[source]  # it is well again
        first = source not in self._read and isinstance(read, Tokenizer)  # whose files may have been replaced since
        self._read[source] = read, 0.0 if first else asyncio.get_running_loop().time() + pause
        return read


def _fits(read: Tokenizer | TokenizerError | None, model: ServedModel) -> bool:
    return isinstance(read, Tokenizer) and model.tokenizer in (0, read.digest)
