"""Protobuf to values and back; the one place where the wire format is read or written.

What is not said in every step has a module of its own: :mod:`transport.codec_parts`.

Decoding checks everything that can be checked without a model or a session: sizes, ranges, tree shape. What fails
raises :class:`MalformedMessage`, which carries the session, if that much could be read, so that only it is affected.

What a router passes on from one worker to the other goes on as it came (:mod:`transport.incoming`).

Built-in draft sources are numbers. Any other is a name, which a message lists once and refers to by numbers from
:data:`FIRST_NAMED` on.

What most messages would repeat is left out: the parents of a chain, a draft model as the source, the names of a
worker's counters once the stream has heard them. No state is kept here: who owns the stream passes those names in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from protos.paceline.v1 import worker_pb2 as pb
from speculation import messages
from transport import codec_parts as parts

MAX_PROPOSED = 512
"""Most draft tokens in one proposal."""
MAX_DEPTH = 128
"""Longest path in one proposal."""
MAX_CHILDREN = 32
"""Most tokens of one proposal that follow the same place."""
MAX_SUPPORT = 64
"""Most tokens in one q; drafters cut theirs to fewer (:mod:`engine.sampling.rejection`)."""
MAX_PROPOSAL_BYTES = 1 << 19
"""Longest proposal; one with the most tokens and the longest q is shorter."""
MAX_UINT32 = (1 << 32) - 1
FIRST_NAMED = 64

_BYTE = tuple(value / 255 for value in range(256))
"""What a byte of confidence stands for."""

_FEATURES = bytes((pb.FromWorker.DESCRIPTOR.fields_by_name["features"].number << 3 | 2,))
RELAYED = {
    bytes((pb.FromWorker.DESCRIPTOR.fields_by_name[said].number << 3 | 2,)): (
        role,
        bytes((pb.ToWorker.DESCRIPTOR.fields_by_name[told].number << 3 | 2,)),
    )
    for role, said, told in (
        ("target", "verified", "verified"),
        ("draft", "proposed", "propose"),
        ("target", "features", "features"),
    )
}
"""By the first byte of what a worker says: the role that says it, and the first byte of what the other is told.

Such entries a router may pass on unread.
"""
MAYBE_RELAYED = frozenset(told for _, told in RELAYED.values())


class MalformedMessage(ValueError):
    """A message that breaks the protocol. ``session`` and ``epoch`` are None when not even they could be read."""

    def __init__(
        self, why: str, session: messages.SessionId | None = None, epoch: int | None = None, *, opening: bool = False
    ) -> None:
        """``why`` names the field, the value and what would be right. ``opening``: whether it was to open a session."""
        super().__init__(why)
        self.session, self.epoch, self.opening = session, epoch, opening


class UnknownKind(MalformedMessage):
    """A message of a kind that is not known here, as a newer peer may send."""

    def __init__(self) -> None:
        super().__init__("a message without a known kind")


# -- one entry of a frame ----------------------------------------------------------------------------------------------


def encode_to_worker(message: messages.ToWorker) -> bytes:
    """One entry of a router's frame."""
    kind, encode = _TO_WORKER_OUT[type(message)]
    return pb.ToWorker(**{kind: encode(message)}).SerializeToString()


def decode_to_worker(entry: bytes) -> messages.ToWorker:
    """One entry of a router's frame; raises :class:`MalformedMessage`."""
    message = _parse(pb.ToWorker(), entry)
    kind = message.WhichOneof("kind")
    if kind is None:
        raise UnknownKind
    told: messages.ToWorker = _checked(getattr(message, kind), TO_WORKER[kind][2])
    return told


def encode_from_worker(
    message: messages.FromWorker | messages.Features | messages.Loading, counter_names: Sequence[str] = ()
) -> bytes:
    """One entry of a worker's frame. ``counter_names``: those of the last :class:`Load` of this stream."""
    if isinstance(message, messages.Load):
        return pb.FromWorker(load=parts.encode_load(message, counter_names)).SerializeToString()
    if isinstance(message, messages.Verification):  # one for every session and step: not written to be copied
        said = pb.FromWorker()
        _verification(message, said.verified)
        return said.SerializeToString()
    kind, encode = _FROM_WORKER_OUT[type(message)]
    return pb.FromWorker(**{kind: encode(message)}).SerializeToString()


def decode_from_worker(
    entry: bytes, counter_names: Sequence[str] = (), asked: parts.Asked | None = None
) -> messages.FromWorker | messages.Loading:
    """One entry of a worker's frame; raises :class:`MalformedMessage`. ``asked``: what may be told; None: anything."""
    message = _parse(pb.FromWorker(), entry)
    match message.WhichOneof("kind"):
        case "verified":
            verified: messages.Verification = _checked(message.verified, _read_verification, asked)
            return verified
        case "load":
            try:
                return parts.decode_load(message.load, counter_names)
            except ValueError as error:
                raise MalformedMessage(str(error)) from error
        case "features":
            raise MalformedMessage("features that are not a target's, or not as it writes them: nobody here reads any")
        case "proposed" | "refused" | "welcome" | "loading" as kind:
            said: messages.FromWorker | messages.Loading = _checked(getattr(message, kind), FROM_WORKER[kind][2])
            return said
    raise UnknownKind


# -- one message each --------------------------------------------------------------------------------------------------


def _proposal(message: messages.Proposal) -> pb.Proposal:
    chain = message.parents == tuple(range(messages.ANCHOR, len(message.parents) - 1))
    return pb.Proposal(
        session=message.session,
        epoch=message.epoch,
        anchor_position=message.anchor_position,
        anchor_digest=message.anchor_digest,
        tokens=message.tokens,
        parents=() if chain else message.parents,
        confidence=bytes([round(255 * min(max(value, 0.0), 1.0)) for value in message.confidence]),
        source=pb.SOURCE_UNSPECIFIED if message.source is messages.Source.DRAFT else parts.SOURCE_OUT[message.source],
        q=[pb.Support(tokens=support.tokens, weights=support.weights) for support in message.q],
        took_us=min(message.took_us, MAX_UINT32),
    )


def _read_proposal(message: pb.Proposal) -> messages.Proposal:
    said = message.tokens, message.parents, message.confidence, message.q
    if max(map(len, said)) > MAX_PROPOSED:
        for name, values in zip(("tokens", "parents", "confidence", "q"), said, strict=True):
            parts.at_most(name, len(values), MAX_PROPOSED)
    if said[3]:
        parts.at_most("q", max(max(len(support.tokens), len(support.weights)) for support in said[3]), MAX_SUPPORT)
    tokens, parents = tuple(said[0]), tuple(said[1])
    proposal = messages.Proposal(
        session=messages.SessionId(message.session),
        epoch=message.epoch,
        anchor_position=message.anchor_position,
        anchor_digest=message.anchor_digest,
        tokens=tokens,
        parents=parents or tuple(range(messages.ANCHOR, len(tokens) - 1)),
        confidence=tuple([_BYTE[value] for value in said[2]]),
        source=parts.SOURCE.get(message.source, messages.Source.DRAFT),
        q=tuple([messages.Support(tuple(support.tokens), tuple(support.weights)) for support in said[3]]),
        took_us=message.took_us,
    )
    if len(parents) > MAX_CHILDREN:  # fewer tokens make no tree that is too deep or too wide
        _check_shape(proposal)
    elif len(tokens) > MAX_DEPTH:
        raise ValueError(f"the tree is {len(tokens)} tokens deep; at most {MAX_DEPTH} are allowed")
    return proposal


def _check_shape(proposal: messages.Proposal) -> None:
    """Raise ValueError if a tree is deeper or wider than any drafter has reason to make it."""
    depths = messages.depths_of(proposal.parents)
    if max(depths, default=0) > MAX_DEPTH:
        raise ValueError(f"the tree is {max(depths)} tokens deep; at most {MAX_DEPTH} are allowed")
    if max(Counter(proposal.parents).values(), default=0) > MAX_CHILDREN:
        raise ValueError(f"more than {MAX_CHILDREN} tokens follow the same place")


def _verification(message: messages.Verification, wire: pb.Verification | None = None) -> pb.Verification:
    """On the wire: written to where it is to stand, if that is told."""
    wire = pb.Verification() if wire is None else wire
    wire.session, wire.epoch, wire.position = message.session, message.epoch, message.position
    wire.tokens.extend(message.tokens)
    wire.digest = message.digest
    wire.took_us = min(message.took_us, MAX_UINT32)
    if message.lead is not None:
        wire.lead = message.lead
    wire.accepted, wire.offered, wire.recovered = message.accepted, message.offered, message.recovered
    if message.cached:
        wire.cached = message.cached
    if message.waited_us:
        wire.waited_us = min(message.waited_us, MAX_UINT32)
    if message.finish:
        wire.finish = parts.FINISH_OUT[message.finish]
    if message.sources or message.refused:
        wire.named.extend(named := parts.names_in((*message.sources, *message.refused)))
        wire.sources.extend(numbers(message.sources, named))  # type: ignore[arg-type]  # beyond what the enum names
        wire.refused.extend(numbers(message.refused, named))  # type: ignore[arg-type]
    if message.logprobs or message.prompt_logprobs:
        wire.logprobs.extend(map(_logprobs, message.logprobs))
        wire.prompt_logprobs.extend(map(_logprobs, message.prompt_logprobs))
    return wire


def _logprobs(message: messages.TokenLogprobs) -> pb.Logprobs:
    return pb.Logprobs(chosen=message.logprob, tokens=message.tokens, logprobs=message.logprobs)


def _read_logprobs(message: pb.Logprobs) -> messages.TokenLogprobs:
    return messages.TokenLogprobs(message.chosen, tuple(message.tokens), tuple(message.logprobs))


class _PromptLogprobs(Collection[messages.TokenLogprobs]):
    """Those of a prompt as they came, each read, and so checked, when it is iterated over: raises ValueError then.

    All of a long one take longer to read than an event loop may stand still; its length is known at once.
    """

    __slots__ = ("_said",)

    def __init__(self, said: Sequence[pb.Logprobs]) -> None:
        self._said = said

    def __len__(self) -> int:
        return len(self._said)

    def __iter__(self) -> Iterator[messages.TokenLogprobs]:
        return map(_read_logprobs, self._said)

    def __contains__(self, one: object) -> bool:
        return any(one == each for each in self)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, tuple | _PromptLogprobs) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))


def _read_verification(message: pb.Verification, asked: parts.Asked | None = None) -> messages.Verification:
    said, accepted, offered = message.tokens, message.accepted, message.offered
    sources, refused = message.sources, message.refused
    logprobs: Sequence[pb.Logprobs] = message.logprobs
    prompt_logprobs: Sequence[pb.Logprobs] = message.prompt_logprobs
    if asked is not None and (logprobs or prompt_logprobs):
        logprobs, prompt_logprobs = parts.check_asked(message, asked)
    if len(said) > parts.MAX_COMMITTED or offered > parts.MAX_TOKENS:
        parts.at_most("tokens", len(said), parts.MAX_COMMITTED)
        parts.at_most("offered", offered, parts.MAX_TOKENS)
    tokens = (*said,)
    if not accepted <= min(offered, len(tokens)):
        raise ValueError(
            f"accepted is {accepted}; it must be at most offered ({offered}) and the {len(tokens)} tokens sent"
        )
    if message.cached > message.position:
        raise ValueError(f"cached is {message.cached}; it must be at most position ({message.position})")
    if len(logprobs) not in (0, len(tokens)):
        raise ValueError(f"logprobs has {len(logprobs)} entries for {len(tokens)} tokens")
    if len(sources) not in (0, accepted):
        raise ValueError(f"sources has {len(sources)} entries for {accepted} accepted tokens")
    if len(refused) not in (0, offered - accepted):
        raise ValueError(f"refused has {len(refused)} entries for {offered - accepted} refused tokens")
    named = parts.read_names("named", message.named) if message.named else ()
    return messages.Verification(
        session=messages.SessionId(message.session),
        epoch=message.epoch,
        position=message.position,
        tokens=tokens,
        digest=message.digest,
        accepted=accepted,
        offered=offered,
        finish=parts.FINISH.get(message.finish),
        lead=message.lead if message.HasField("lead") else None,
        cached=message.cached,
        sources=sources_of(sources, named),
        refused=sources_of(refused, named),
        recovered=message.recovered,
        logprobs=tuple(map(_read_logprobs, logprobs)) if logprobs else (),
        prompt_logprobs=_PromptLogprobs(prompt_logprobs) if prompt_logprobs else (),
        took_us=message.took_us,
        waited_us=message.waited_us,
    )


def _refused(message: messages.Refused) -> pb.Refused:
    text, code = message.message[: parts.MAX_TEXT], parts.CODE_OUT[message.code]
    return pb.Refused(session=message.session, epoch=message.epoch, code=code, message=text)


def _read_refused(message: pb.Refused) -> messages.Refused:
    code = parts.CODE.get(message.code, messages.RefusalCode.INTERNAL)
    return messages.Refused(messages.SessionId(message.session), message.epoch, code, message.message[: parts.MAX_TEXT])


_Kind = tuple[type, Callable[[Any], Any], Callable[[Any], Any]]
_PROPOSAL: _Kind = messages.Proposal, _proposal, _read_proposal
_VERIFICATION: _Kind = messages.Verification, _verification, _read_verification
TO_WORKER: dict[str, _Kind] = {
    "open": parts.OPEN_KIND,
    "propose": _PROPOSAL,
    "verified": _VERIFICATION,
    "close": (
        messages.Close,
        lambda message: pb.Close(session=message.session, epoch=message.epoch),
        lambda said: messages.Close(messages.SessionId(said.session), said.epoch),
    ),
    "subscribe": parts.SUBSCRIBE_KIND,
    "features": parts.FEATURES_KIND,
}
FROM_WORKER: dict[str, _Kind] = {
    "verified": _VERIFICATION,
    "proposed": _PROPOSAL,
    "refused": (messages.Refused, _refused, _read_refused),
    "welcome": parts.WELCOME_KIND,
    "loading": parts.LOADING_KIND,
    "features": parts.FEATURES_KIND,
}
"""By their names on the wire; a load is read with the names of its counters besides."""
_TO_WORKER_OUT = {value: (kind, encode) for kind, (value, encode, _) in TO_WORKER.items()}
_FROM_WORKER_OUT = {value: (kind, encode) for kind, (value, encode, _) in FROM_WORKER.items()}


def numbers(sources: Iterable[messages.SourceName], named: Sequence[messages.SourceName]) -> list[int]:
    """What stands for each on the wire; ``named``: those that the message lists."""
    known = parts.SOURCE_OUT | {name: FIRST_NAMED + i for i, name in enumerate(named)} if named else parts.SOURCE_OUT
    return [known[source] for source in sources]


def sources_of(numbers: Sequence[int], named: Sequence[messages.SourceName]) -> tuple[messages.SourceName, ...]:
    """The other way round. A number that means nothing here is read as a draft model."""
    if not numbers:
        return ()
    known: dict[int, messages.SourceName] = parts.SOURCE | {FIRST_NAMED + i: name for i, name in enumerate(named)}
    return tuple(known.get(number, messages.Source.DRAFT) for number in numbers)


def is_features(entry: bytes) -> bool:
    """Whether an entry of a worker's frame holds features: a hint, and a long one."""
    return entry[:1] == _FEATURES


# -- checks ------------------------------------------------------------------------------------------------------------

_Wire = TypeVar("_Wire", pb.ToWorker, pb.FromWorker)


def _parse(message: _Wire, entry: bytes) -> _Wire:
    try:
        message.ParseFromString(entry)
    except DecodeError as error:
        raise MalformedMessage(f"not a {type(message).__name__} message: {error}") from error
    return message


def _checked(message: Any, read: Callable[..., Any], *more: Any) -> Any:
    try:
        return read(message, *more)
    except ValueError as error:
        opening = isinstance(message, pb.Open)
        raise MalformedMessage(
            str(error), messages.SessionId(message.session), message.epoch, opening=opening
        ) from error
