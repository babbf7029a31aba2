"""Workers that serve, watched: the target's own text for every prompt, and what steps and messages take.

The text is decoded plainly. What a target's step costs by the tokens that it verifies is then found without any
drafter: requests carry the text just decoded as their ``prediction``, so every draft is right and the depth allowed
sets the size of the step. With a head at the target, each such run is followed by one in which it guesses, too. What a
drafter's steps cost, and messages between the two, shows when it drafts for a few of the prompts, in turn with plain
decoding and with drafting and verification in turn, where one waits for the other.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.fit.command import PLAIN, FitError, FitOptions, Way
from benchmarks.fit.predict import SUFFIX_TOKENS
from benchmarks.harness.measure import Batch, Run, run_once, served
from benchmarks.harness.processes import ReadyProcess, WorkerPlan, connected, running
from benchmarks.harness.prompts import PromptError
from cluster.config.environment import on_cpu
from router.dispatch import Dispatcher
from router.text.tokenizer import Tokenizer
from simulation.costs import Costs, Curve
from simulation.recorded import Line, UselessRecord, costs_in, slowdown
from speculation.events import Role
from speculation.messages import Schedule, Source, Speculation, Token

TOGETHER = 16
"""Prompts decoded at a time for their text."""
DEPTHS = (0, 1, 2, 4, 8, 12)
"""Depths at which verification of one request is timed; 0: plain decoding."""
DEPTHS_TOGETHER = (0, 1, 3)
"""The same of several at once, whose drafts share a step's room."""
TIMED = 3
"""Prompts of one request at a time."""
DRAFTED = 6
SEQUENTIAL = 4
"""Draft length of the requests that wait for their drafts."""
GPU_SHARES = {Role.TARGET: 0.8, Role.DRAFT: 0.2}
"""What each has of a GPU, if that is where they compute: they run at the same time."""
SHORTEST = 8
"""A text of fewer tokens has no pace worth a figure, and is left out."""

Report = Callable[[str], None]
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class TargetText:
    """A prompt and what the target says after it."""

    kind: str
    prompt: tuple[Token, ...]
    tokens: tuple[Token, ...]


@dataclass(slots=True)
class Watched:
    """What the workers have shown."""

    vocabulary: int
    texts: list[TargetText] = field(default_factory=list)
    lines: dict[str | None, list[Line]] = field(default_factory=dict)
    """Of their records, by the draft that was there; those of the target alone under None."""
    plainly: dict[str, list[Span]] = field(default_factory=dict)
    """When the target decoded and the draft was idle."""
    ahead: dict[str, list[Span]] = field(default_factory=dict)
    """When the draft drafted while the target verified."""
    guessing: list[Span] = field(default_factory=list)
    """When a head guessed in each step of the target, and no drafter was there."""

    @property
    def heads(self) -> Mapping[int, Curve]:
        """What steps take in which a head guesses; nothing without one."""
        steps = _within(self.lines[None], self.guessing)
        return costs_in(steps, drafter=False).verify if self.guessing else {}

    def costs(self, draft: str | None) -> Costs:
        """Of the target with a drafter, or alone. What its steps cost by themselves is the same for all."""
        undisturbed = [line for there in self.plainly for line in _within(self.lines[there], self.plainly[there])]
        without_head = [line for line in self.lines[None] if not _ended_in(line, self.guessing)]
        alone = costs_in([*without_head, *undisturbed], drafter=False)
        if draft is None:
            return alone
        lines = self.lines[draft]
        try:
            drafted = costs_in(lines)
            disturbed = slowdown(_within(lines, self.ahead[draft]), alone)
            contention = disturbed / slowdown(_within(lines, self.plainly[draft]), alone)
        except UselessRecord as error:
            raise FitError(f"--draft {draft}: it drafted nothing that could be timed: {error}") from error
        return replace(drafted, verify=alone.verify, verify_pause=alone.verify_pause, contention=contention)


async def watch(options: FitOptions, prompts: Sequence[tuple[Token, ...]], folder: Path, report: Report) -> Watched:
    """Run the workers and decode; ``prompts`` are those of ``options`` in tokens, ``folder`` takes the records.

    Raises :class:`FitError`, :class:`benchmarks.harness.prompts.PromptError` or what workers raise.
    """
    windows: dict[str | None, Span] = {}
    files = {draft: folder / f"draft-{number}.jsonl" for number, draft in enumerate(options.drafters)}
    report(f"loading {options.target}")
    async with serving(options, Role.TARGET, options.target, folder / "target.jsonl") as target:
        async with connected(target) as dispatcher:
            watched = Watched(_check(options, prompts, dispatcher))
            requests = Requests(dispatcher, options)
            began = time.perf_counter()
            await _decode(requests, prompts, watched, report)
            await _time_verification(requests, watched, report)
            windows[None] = began, time.perf_counter()
        for draft in options.drafters:
            report(f"loading {draft}")
            async with (
                serving(options, Role.DRAFT, draft, files[draft]) as drafter,
                connected(target, drafter) as dispatcher,
            ):
                began = time.perf_counter()
                await _draft(Requests(dispatcher, options), draft, watched, report)
                windows[draft] = began, time.perf_counter()
    steps = _lines(folder / "target.jsonl")
    for there, window in windows.items():
        watched.lines[there] = _within(steps, [window])
        watched.lines[there] += _lines(files[there]) if there is not None else []
    return watched


def serving(options: FitOptions, role: Role, model: str, record: Path) -> AbstractAsyncContextManager[ReadyProcess]:
    """One worker, on a core of its own if one is all that it computes with; ``model`` may be the head of a drafter."""
    core = None if options.threads > 1 else 0 if role is Role.TARGET else 1
    flags = ["--dtype", options.dtype, "--device", options.device, "--threads", str(options.threads)]
    flags += [] if on_cpu(options.device) else ["--set", f"{role}.gpus={GPU_SHARES[role]}"]
    if role is Role.DRAFT and model == options.away:
        flags += ["--draft-eagle", model]
        model = options.target
    elif role is Role.DRAFT:
        flags += ["--target-tokenizer", options.target]  # translates nothing if it is its own
    else:
        flags += ["--draft-eagle", options.eagle, "--eagle-at", options.eagle_at] if options.eagle else []
        flags += ["--suffix-tokens", str(kept(options))]
    return running(WorkerPlan(role, Path(model), core, record, flags))


def kept(options: FitOptions) -> int:
    """Tokens of earlier outputs that a target keeps."""
    return SUFFIX_TOKENS if Source.SUFFIX in options.sources else 0


@dataclass(frozen=True, slots=True)
class Requests:
    """Asks the workers as a user would."""

    dispatcher: Dispatcher
    options: FitOptions

    async def run(self, texts: Sequence[TargetText], speculation: Speculation, *, predicted: bool = False) -> Run:
        """Decode ``texts`` again, all at the same time; ``predicted``: with their tokens as prediction."""
        tokens, options = tuple(text.tokens for text in texts), self.options
        prompts, each = tuple(text.prompt for text in texts), tuple(map(len, tokens))
        expected = tokens if predicted else ()
        batch = Batch(prompts, max(each), options.temperature, options.seed, each, predictions=expected)
        return await run_once(served(self.dispatcher, speculation), batch)


def _check(options: FitOptions, prompts: Sequence[tuple[Token, ...]], dispatcher: Dispatcher) -> int:
    """Whether the target can do what is asked; returns its vocabulary."""
    (welcome,) = (peer.welcome for peer in dispatcher.pool.peers.values())
    assert welcome is not None, "a router is connected once its workers have introduced themselves"
    if not welcome.speculates:
        why = "cannot take back a token that was drafted in vain, so nothing can draft for it"
        raise FitError(f"--target {options.target}: its model {why}; serve it plainly")
    room = welcome.context - options.tokens
    for given, prompt in zip(options.prompts, prompts, strict=True):
        if not 0 < len(prompt) <= room:
            most = f"1 to {room}, as the context of {welcome.context} has to hold --tokens {options.tokens} too"
            raise PromptError(f"{given.where}: the prompt has {len(prompt)} tokens; it must have {most}")
    return welcome.vocabulary


async def _decode(requests: Requests, prompts: Sequence[tuple[Token, ...]], watched: Watched, report: Report) -> None:
    """The target's text for every prompt."""
    options = requests.options
    stop_tokens = Tokenizer.load(options.target).stop_tokens
    for first in range(0, len(prompts), TOGETHER):
        report(f"the target's own text, prompt {first + 1} of {len(prompts)}")
        part = slice(first, first + TOGETHER)
        asked = served(requests.dispatcher, PLAIN.speculation(), stop_tokens=stop_tokens)
        run = await run_once(asked, Batch(tuple(prompts[part]), options.tokens, options.temperature, options.seed))
        for given, prompt, said in zip(options.prompts[part], prompts[part], run.decoded, strict=True):
            if len(said.tokens) >= SHORTEST:
                watched.texts.append(TargetText(given.kind, prompt, said.tokens))
    if not watched.texts:
        raise FitError(
            f"--prompts: the target ends each text within {SHORTEST} tokens; give prompts with longer answers"
        )


async def _time_verification(requests: Requests, watched: Watched, report: Report) -> None:
    """Steps of every size, for every number of requests at a time; in turn with those in which a head guesses."""
    texts = watched.texts
    for sessions in requests.options.sessions:
        report(f"what verification costs, {sessions} at a time")
        alone = sessions == 1
        for texts_of_run in [[text] for text in spread(texts, TIMED)] if alone else [repeated(texts, sessions)]:
            for depth in DEPTHS if alone else DEPTHS_TOGETHER:
                speculation = Speculation(
                    enabled=depth > 0, max_depth=max(depth, 1), sources=frozenset({Source.PREDICTION})
                )
                await requests.run(texts_of_run, speculation, predicted=depth > 0)
                if requests.options.at_target:
                    await _time_head(requests, texts_of_run, speculation, watched)


async def _time_head(requests: Requests, texts: Sequence[TargetText], without: Speculation, watched: Watched) -> None:
    """The same with a head; where nothing is predicted, its guesses alone are verified, as far as that pays."""
    speculation = replace(without, enabled=True, sources=frozenset({Source.PREDICTION, Source.EAGLE}))
    began = time.perf_counter()
    await requests.run(texts, speculation, predicted=without.enabled)
    watched.guessing.append((began, time.perf_counter()))


async def _draft(requests: Requests, draft: str, watched: Watched, report: Report) -> None:
    """Let a drafter work: ahead of the target, in turn with it, and not at all."""
    way = Way(draft)
    in_turn = Speculation(max_depth=SEQUENTIAL, schedule=Schedule.SEQUENTIAL, sources=way.sources)
    plainly, ahead = watched.plainly.setdefault(draft, []), watched.ahead.setdefault(draft, [])
    report(f"what drafting costs with {way}")
    for text in spread(watched.texts, DRAFTED):
        for speculation, spans in ((PLAIN.speculation(), plainly), (way.speculation(), ahead), (in_turn, None)):
            began = time.perf_counter()
            await requests.run([text], speculation)
            if spans is not None:
                spans.append((began, time.perf_counter()))
    for sessions in requests.options.sessions:
        if sessions > 1:
            report(f"what drafting costs with {way}, {sessions} at a time")
            await requests.run(repeated(watched.texts, sessions), way.speculation())


def spread(texts: Sequence[TargetText], count: int) -> list[TargetText]:
    """At most so many of them, of every kind in turn."""
    by_kind: dict[str, list[TargetText]] = {}
    for text in texts:
        by_kind.setdefault(text.kind, []).append(text)
    rounds = itertools.zip_longest(*by_kind.values())
    return [text for one_of_each in rounds for text in one_of_each if text is not None][:count]


def repeated(texts: Sequence[TargetText], count: int) -> list[TargetText]:
    """So many of them, of every kind in turn, again and again if need be."""
    return list(itertools.islice(itertools.cycle(spread(texts, count)), count))


def _lines(file: Path) -> list[Line]:
    """A record. Its worker has ended, so all of it is there."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _within(lines: Iterable[Line], spans: Sequence[Span]) -> list[Line]:
    """Those of steps, and of waits, that ended in one of the spans."""
    return [line for line in lines if _ended_in(line, spans)]


def _ended_in(line: Line, spans: Sequence[Span]) -> bool:
    at = line["wait"][1] if "wait" in line else line["end"]
    return any(began <= at <= ended for began, ended in spans)
