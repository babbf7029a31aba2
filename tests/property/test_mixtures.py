"""Mixtures of draft sources: whatever drafts together, the text for a seed is plain decoding's, token for token.

A *mixture* says who drafts (draft models, with a second level of their own or another tokenizer, or an EAGLE head, on
a worker that may be killed; lookup, prediction, suffix, an EAGLE head at the target, a source of somebody's own, a
grammar) and what is asked of the text. Any two of these things meet in one of the mixtures, which are drawn from a
seed. Each is served by real loops over real caches and a tiny random model in float64, in which it does not matter to a
token how it is batched. Its law is not looked at here: under rejection rule the text is the same at temperature 0
alone, and tests/integration/test_distribution.py counts the rest.
"""

from __future__ import annotations

import copy
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, ClassVar

import pytest
import tokenizers
import torch

from draft_service.eagle import HeadLookahead
from draft_service.head_engine import HeadEngine
from draft_service.lookahead import Lookahead
from draft_service.staged_drafting import Assistant, Guesser, StagedDrafting
from draft_service.staged_drafting import Lookup as LookupGuesses
from draft_service.tokenizer import DraftTokenizer, SharedVocabulary
from draft_service.translation import OtherVocabulary
from engine.cache.kv_cache import KVCache
from engine.eagle.cached import CachedHead
from engine.eagle.config import EagleConfig
from engine.eagle.head import EagleHead
from engine.loading.loader import load
from engine.model import Model
from engine.step import Engine
from speculation.acceptance import AcceptanceResult
from speculation.drafting.guesses import Forward
from speculation.messages import (
    ANCHOR,
    Features,
    Limits,
    Open,
    Proposal,
    Refused,
    RequestOptions,
    Rule,
    Sampling,
    Schedule,
    SessionId,
    Source,
    SourceName,
    Speculation,
    Subscribe,
    Token,
    ToWorker,
    Verification,
    Welcome,
)
from speculation.sources.registry import _makers, register
from speculation.sources.suffix import SuffixSettings
from speculation.verifying import planner
from speculation.verifying.budget import StepCost
from speculation.verifying.target_session import TargetSession
from target_service.scheduler import Budget
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.covering import Row, covering
from tests.grammars import STOP, TINY, save_tokenizer
from tests.integration.test_eagle_remote import KINDS, spoilt
from tests.unit.engine.engine_models import save_model
from transport.worker import Outgoing

Text = list[Token] | str
"""What a session said, or why it was refused."""

LINK = "router"
FINGERPRINT = 7
"""Of the head on a draft worker."""
SEED = 24
NEW = 14
LETTERS = "abcdefgh"
GRAMMAR = f"start: (/[{LETTERS[:6]}]/ /[{LETTERS[:3]}]/ {json.dumps(LETTERS[::-1][:3])})~1..3"
OWN = "hearsay"
PENALTIES: dict[str, dict[str, Any]] = {
    "none": {},
    "additive": {"presence_penalty": 0.7, "frequency_penalty": -0.4},
    "of repetition": {"repetition_penalty": 1.3},
}

LOCAL = ("lookup", "suffix", "eagle", "own", "grammar")
FACTORS: dict[str, Sequence[Any]] = {
    "drafter": ("none", "alike", "of another tokenizer", "head"),
    "killed": (False, True),
    "features": ("sent", "late", "spoilt"),
    "second": ("none", "lookup", "assistant"),
    "prediction": ("none", "nearly right", "wrong"),
    **dict.fromkeys((*LOCAL, "reopened", "adaptive"), (False, True)),
    "temperature": (0.0, 0.7, 1.0),
    "rule": tuple(Rule),
    "penalties": tuple(PENALTIES),
    "schedule": (Schedule.TRIE,),
    "depth": (1, 3, 16),
}
BASELINES = FACTORS | {"schedule": (Schedule.SEQUENTIAL, Schedule.PARALLEL)} | dict.fromkeys(LOCAL, (True,))
"""Schedules under which all sources at the target are allowed and none may do anything."""


def possible(row: Row) -> bool:
    """Whether there can be such a mixture, or one that has these things."""
    guessed_for = row.get("second", "none") == "none" or row.get("drafter", "alike") == "alike"
    is_fed = row.get("features", "sent") == "sent" or row.get("drafter", "head") == "head"
    nobody_killed = not row.get("killed", False) or row.get("drafter", "alike") != "none"
    both_at_once = row.get("second", "none") == "none" or row.get("features", "sent") == "sent"
    the_same_text = row.get("rule") is not Rule.REJECTION or row.get("temperature", 0.0) == 0.0
    return guessed_for and is_fed and both_at_once and nobody_killed and the_same_text


@dataclass(frozen=True)
class Mixture:
    """Who drafts, and what is asked of the text."""

    drafter: str
    killed: bool
    """Another worker drafts from mid-text on."""
    features: str
    """What becomes of the features that a head away from the target reads."""
    second: str
    prediction: str
    lookup: bool
    suffix: bool
    eagle: bool
    own: bool
    grammar: bool
    reopened: bool
    """All workers lose all sessions in mid-text."""
    adaptive: bool
    temperature: float
    rule: Rule
    penalties: str
    schedule: Schedule
    depth: int

    @property
    def sources(self) -> frozenset[SourceName]:
        """Whom it allows to draft."""
        chosen: dict[SourceName, bool] = {
            Source.DRAFT: self.drafter != "none",
            Source.LOOKUP: self.lookup,
            Source.PREDICTION: self.prediction != "none",
            Source.SUFFIX: self.suffix,
            Source.EAGLE: self.eagle,
            Source.GRAMMAR: self.grammar,
            OWN: self.own,
        }
        return frozenset(name for name, is_in in chosen.items() if is_in)


MIXTURES = [Mixture(**row) for factors in (FACTORS, BASELINES) for row in covering(factors, possible, SEED)]


class Hearsay:
    """A source of somebody's own, in a tree of its own: it has heard what is said, and gets every other place wrong."""

    source = OWN
    depth = 2
    heard: ClassVar[dict[tuple[Sequence[Token], int], Sequence[Token]]] = {}
    """What plain decoding says, by prompt and seed."""

    def __init__(self, opened: Open) -> None:
        prompt = opened.tokens[: opened.prompt]
        self._text = (*prompt, *self.heard.get((prompt, opened.sampling.seed), ()))
        self._end = 0

    def extend(self, tokens: Sequence[Token]) -> None:
        self._end += len(tokens)

    def propose(self, depth: int) -> Tree:
        following = self._text[self._end : self._end + 2]
        if len(following) < 2:
            return Tree(())
        first, second = following
        places = (first + 1, first, second) if self._end % 2 else (first, first + 1, second)
        return Tree(places[: (0, 2, 3)[depth]])


@dataclass(frozen=True)
class Tree:
    """Two siblings, and a token behind the first."""

    tokens: tuple[Token, ...]

    @property
    def parents(self) -> Sequence[int]:
        return (ANCHOR, ANCHOR, 0)[: len(self.tokens)]

    @property
    def confidence(self) -> tuple[float, ...]:
        return (0.4, 0.3, 0.4)[: len(self.tokens)]


@dataclass
class Bench:
    """The models of all mixtures."""

    target: Model
    draft: Model
    other: Model
    shared: SharedVocabulary
    eagle: EagleHead
    features: EagleHead
    """The same as it makes features for a drafter that has it."""
    letters: list[Token]
    known: dict[tuple[Open, ...], list[Text]] = field(default_factory=dict)
    """What plain decoding says."""
    served: dict[Mixture, Said] = field(default_factory=dict)

    def plain(self, opened: Sequence[Open]) -> list[Text]:
        """The texts of sessions without drafts."""
        asked = tuple(replace(one, speculation=Speculation(enabled=False)) for one in opened)
        if asked not in self.known:
            self.known[asked] = Serving(self, None).run(asked)
        return self.known[asked]

    def serve(self, mixture: Mixture) -> Said:
        """What comes of a mixture; it is served once."""
        if mixture not in self.served:
            self.served[mixture] = serve(self, mixture)
        return self.served[mixture]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A random model that says little but a few letters, one that is much like it, and that one with other tokens."""
    folder = tmp_path_factory.mktemp("models")
    backend = save_tokenizer(folder)
    size = backend.get_vocab_size()
    saved = save_model("llama", folder, **TINY, vocab_size=size, eos_token_id=STOP)
    letters = [token for letter in LETTERS for token in backend.encode(letter).ids]
    target, draft, other = (load(saved, dtype="fp64", device="cpu", self_test=False) for _ in range(3))
    generator = torch.Generator().manual_seed(1)
    renumbered = torch.tensor([(7 * token + 3) % size for token in range(size)])
    with torch.no_grad():
        for model in (target, draft, other):
            output = model.module.get_output_embeddings().weight
            output *= 0.02
            output[letters] *= 220
        for model in (draft, other):
            for parameter in model.module.parameters():
                parameter += 0.2 * parameter.std() * torch.randn(parameter.shape, generator=generator).double()
        for table in (other.module.get_input_embeddings().weight, other.module.get_output_embeddings().weight):
            table[renumbered] = table.clone()
    names = DraftTokenizer(saved, backend), DraftTokenizer("other", _renumbered(backend, renumbered.tolist()))
    shared = SharedVocabulary(*names, target_size=size, own_size=size)
    eagle = _eagle_of(target, size)
    features = copy.copy(eagle)
    features.fingerprint = FINGERPRINT
    return Bench(target, draft, other, shared, eagle, features, letters)


def _eagle_of(target: Model, size: int) -> EagleHead:
    """A random head that says what the target says most."""
    width, heads = TINY["hidden_size"], TINY["num_attention_heads"]
    kv_heads, rope = TINY["num_key_value_heads"], {"rope_type": "default", "rope_theta": 10000.0}
    sizes = (width, width, size, size, 1, heads, kv_heads, width // heads, 2 * width, 1e-5, 256, rope)
    config = EagleConfig(*sizes, aux_layers=(0,))
    head = EagleHead(config).double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.2, generator=generator)
    head.embed_tokens.weight.copy_(target.module.get_input_embeddings().weight)
    head.lm_head.weight.copy_(target.module.get_output_embeddings().weight)
    return head


def _renumbered(backend: tokenizers.Tokenizer, numbers: Sequence[Token]) -> tokenizers.Tokenizer:
    """The same tokenizer with other numbers, and with one token of two letters more instead of some longer one."""
    document = json.loads(backend.to_str())
    model = document["model"]
    model["vocab"] = {spelt: numbers[token] for spelt, token in model["vocab"].items()}
    longest = max(model["vocab"], key=len)
    model["vocab"]["ab"] = model["vocab"].pop(longest)
    merges = [merge for merge in model["merges"] if "".join(merge) != longest]
    model["merges"] = [["a", "b"], *merges]
    for token in document["added_tokens"]:
        token["id"] = numbers[token["id"]]
    return tokenizers.Tokenizer.from_str(json.dumps(document))


def engine_of(model: Model, eagle: EagleHead | None = None) -> Engine:
    cache = KVCache(model.layers, 1024, dtype=model.dtype, device=model.device)
    return Engine(model, cache, eagle=eagle)


class Serving:
    """A target and whoever drafts for it; None: nobody does."""

    def __init__(self, bench: Bench, mixture: Mixture | None) -> None:
        self.bench, self.mixture = bench, mixture
        vocabulary, context = bench.target.vocabulary, bench.target.context
        self.welcome = Welcome("target", "tiny", vocabulary, context, head=FINGERPRINT)
        budget = Budget(drafts_per_session=12, verify=48)
        eagle = bench.eagle if mixture and mixture.eagle else None
        if mixture and mixture.drafter == "head":
            eagle = bench.features
        self.engines: list[Engine | HeadEngine] = [engine := engine_of(bench.target, eagle)]
        suffix = SuffixSettings(4096 if mixture and mixture.suffix else 0)
        limits = TargetLimits(budget=budget, adaptive=mixture is not None and mixture.adaptive, suffix=suffix)
        self.target = VerifyLoop(engine, self.welcome, limits)
        self.late: list[Features] = []
        self.kinds = itertools.cycle(KINDS)
        self.drafter = self._drafter() if mixture and mixture.drafter != "none" else None

    def _drafter(self) -> Lookahead:
        """One that has no sessions yet."""
        assert self.mixture is not None
        bench, mixture = self.bench, self.mixture
        del self.engines[1:]
        if mixture.drafter == "head":
            head = HeadEngine(CachedHead(bench.eagle, 1024), bench.target)
            self.engines.append(head)
            return HeadLookahead(head, self.welcome)
        alike = mixture.drafter == "alike"
        engine = engine_of(bench.draft if alike else bench.other)
        self.engines.append(engine)
        reader = None if alike else OtherVocabulary(bench.other, bench.shared)
        guessers: list[Guesser] = [LookupGuesses()] if mixture.second == "lookup" else []
        if mixture.second == "assistant":
            assistant = engine_of(bench.draft)
            self.engines.append(assistant)
            guessers.append(Assistant(assistant))
        second = StagedDrafting(bench.target.vocabulary, guessers)
        return Lookahead(engine, self.welcome, reader=reader, staged=second)

    def run(self, opened: Sequence[Open], reopened: bool = False, killed: bool = False) -> list[Text]:
        """What the sessions say."""
        texts: dict[int, Any] = {one.session: [] for one in opened}
        live = {one.session: one for one in opened}
        self._open(opened)
        deadline = time.monotonic() + 60
        while live:
            assert time.monotonic() < deadline
            for _ in range(3):
                self._relay(self.drafter.step() if self.drafter else None)
                while self.late:
                    self._hear(self.late.pop())
            for _, message in self.target.step() or []:
                if isinstance(message, Features):
                    self._feed(message)
                    continue
                if isinstance(message, Refused):
                    texts[message.session] = message.message
                    del live[message.session]
                    continue
                assert isinstance(message, Verification)
                texts[message.session] += message.tokens
                if message.finish:
                    del live[message.session]
                self._hear(message)
            under_way = any(len(texts[number]) > NEW / 3 for number in live)
            if not under_way:
                continue
            now = [replace(one, tokens=(*one.tokens, *texts[one.session])) for one in live.values()]
            if killed:
                killed = False
                self.drafter = self._drafter()
                self._join(now)
            if reopened:
                reopened = False
                self._open([replace(one, epoch=2) for one in now])
        while self.target.due() is not None:  # until all that was said is in the suffix index
            assert not self.target.step()
        return list(texts.values())

    def _open(self, opened: Sequence[Open]) -> None:
        for one in opened:
            assert self.target.receive(LINK, one) == []
        self._join(opened)

    def _join(self, opened: Sequence[Open]) -> None:
        """Have the drafter draft for sessions that are open at the target."""
        if self.drafter is None:
            return
        for one in opened:
            assert self.drafter.receive(LINK, one) == []
            if isinstance(self.drafter, HeadLookahead):
                for _, features in self.target.receive(LINK, Subscribe(one.session, one.epoch, FINGERPRINT)):
                    assert isinstance(features, Features)
                    self._feed(features)
        while self.drafter.due() is not None:  # else it depends on the clock who drafts
            self._relay(self.drafter.step())

    def _feed(self, features: Features) -> None:
        """Features on their way to the drafter."""
        assert self.mixture is not None
        match self.mixture.features:
            case "sent":
                self._hear(features)
            case "late":
                self.late.append(features)
            case _:
                for arriving in spoilt(next(self.kinds))(features):
                    self._hear(arriving)

    def _hear(self, message: ToWorker) -> None:
        self._relay(self.drafter.receive(LINK, message) if self.drafter else None)

    def _relay(self, drafts: Outgoing | None) -> None:
        for _, message in drafts or []:
            if isinstance(message, Proposal):
                self.target.receive(LINK, message)

    def close(self) -> None:
        """Nothing is left of any session."""
        for worker in filter(None, (self.target, self.drafter)):
            worker.forget(LINK)
        for engine in self.engines:
            engine.cache.validate()
            assert engine.cache.free_tokens == engine.cache.capacity


def openings(bench: Bench, mixture: Mixture, first: int, seeds: Sequence[int]) -> list[Open]:
    """A session of a mixture for each seed, numbered from ``first`` on, each with a prompt of its own."""
    opened = []
    for number, seed in enumerate(seeds):
        prompt = tuple(Random(number).choices(bench.letters, k=6 + 5 * number)) * 2
        sampling = Sampling(mixture.temperature, seed=seed, **PENALTIES[mixture.penalties])
        limits = Limits(len(prompt) + NEW, frozenset({STOP}))
        speculation = Speculation(
            max_depth=mixture.depth, rule=mixture.rule, schedule=mixture.schedule, sources=mixture.sources
        )
        request_options = RequestOptions(grammar=GRAMMAR if mixture.grammar else "")
        opened.append(
            Open(
                SessionId(first + number),
                1,
                prompt,
                sampling,
                limits,
                speculation,
                prompt=len(prompt),
                request_options=request_options,
            )
        )
    return opened


def foretold(bench: Bench, prediction: str, text: Sequence[Token]) -> tuple[Token, ...]:
    """What a caller expects where this is said."""
    match prediction:
        case "none":
            return ()
        case "wrong":
            return tuple(Random(len(text)).choices(bench.letters, k=NEW))
        case _:
            return (*text[:4], bench.letters[0], *text[5:])


@dataclass
class Said:
    """What came of a mixture: by session, the texts, and those of plain decoding; and how often a source was right."""

    texts: list[Text] = field(default_factory=list)
    plain: list[Text] = field(default_factory=list)
    right: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)


def serve(bench: Bench, mixture: Mixture) -> Said:
    """Serve two sessions, then, to workers that may remember what was said, the first again and a similar one."""
    said, serving = Said(), Serving(bench, mixture)
    for first, seeds in ((1, (0, 1)), (11, (0, 2))):
        opened = openings(bench, mixture, first, seeds)
        plain = bench.plain(openings(bench, mixture, 1, seeds))
        Hearsay.heard |= {
            (one.tokens, one.sampling.seed): text
            for one, text in zip(opened, plain, strict=True)
            if isinstance(text, list)
        }
        opened = [
            replace(
                one, request_options=replace(one.request_options, prediction=foretold(bench, mixture.prediction, text))
            )
            for one, text in zip(opened, plain, strict=True)
        ]
        said.texts += serving.run(opened, mixture.reopened, mixture.killed)
        said.plain += plain
    counters = serving.target.counters
    for source, offered in counters.offered_from.items():
        name = f"drafter: {mixture.drafter}" if source == Source.DRAFT else source
        said.right[name] += counters.accepted_from[source]
        said.wrong[name] += offered - counters.accepted_from[source]
    if serving.drafter:
        followed = serving.drafter.counters.followed
        said.right[f"guesses: {mixture.second}"] += followed
        said.wrong[f"guesses: {mixture.second}"] += serving.drafter.counters.guessed - followed
    serving.close()
    return said


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There is no clock here: what would be waited for has not come, and all drafts and guesses pay."""
    monkeypatch.setattr(planner, "DEAF_AFTER", 0.0)
    monkeypatch.setattr(StepCost, "__call__", lambda *_, **__: 1.0)
    monkeypatch.setattr(Forward, "pays", lambda *_: True)
    register(OWN, Hearsay)
    yield
    del _makers[OWN]


@pytest.mark.parametrize("number", range(len(MIXTURES)))
def test_the_text_is_that_of_plain_decoding(bench: Bench, number: int, request: pytest.FixtureRequest) -> None:
    said = bench.serve(MIXTURES[number])
    again = f"python -m pytest '{request.node.nodeid}'"
    assert said.texts == said.plain, f"seed {SEED}, {MIXTURES[number]}; again: {again}"


WHO = {
    **dict.fromkeys((f"drafter: {who}" for who in FACTORS["drafter"] if who != "none"), Source.DRAFT),
    **{source: source for source in Source if source != Source.DRAFT},
    OWN: OWN,
}
"""Who drafts in the mixtures, and under which name."""


def test_every_source_is_right_and_wrong_in_some_mixture(bench: Bench) -> None:
    """Else nothing was shown of it."""
    right, wrong = Counter[str](), Counter[str]()
    for mixture in MIXTURES:
        said = bench.serve(mixture)
        right += said.right
        wrong += said.wrong
    for who in (*WHO, "guesses: lookup", "guesses: assistant"):
        assert min(right[who], wrong[who]) > 0, (
            f"seed {SEED}: {who} was right {right[who]} and wrong {wrong[who]} times"
        )


@pytest.mark.parametrize("who", WHO)
def test_a_draft_that_was_not_drawn_would_be_found(bench: Bench, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a target commits what a source proposed and the target refused, some mixture shows it."""
    settle = TargetSession.settle

    def credulous(self: TargetSession, outcome: AcceptanceResult, *times: Any, **named: Any) -> Any:
        assert self._tree is not None
        nodes, parents = self._tree.nodes, self._tree.parents
        refused = (i for i, node in enumerate(nodes) if node.source == WHO[who] and i not in outcome.kept)
        path = [next(refused, ANCHOR)]
        while path[0] != ANCHOR:
            path.insert(0, parents[path[0]])
        changed = AcceptanceResult(tuple(path[1:]), outcome.own) if path[1:] else outcome
        return settle(self, changed, *times, **named)

    refused_some = [mixture for mixture in MIXTURES if bench.serve(mixture).wrong[who]]
    monkeypatch.setattr(TargetSession, "settle", credulous)
    found = (serve(bench, mixture) for mixture in refused_some)
    assert any(said.texts != said.plain for said in found), f"seed {SEED}"
