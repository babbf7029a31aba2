"""What a router tells of its cluster: rates of the last seconds, what happened, and the whole as JSON."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from router.answers.responses import encode
from router.errors import CODES
from router.generation import Generation, ServedModel
from router.sessions.pool import Peer, PoolEvents, WorkerPool
from router.sessions.run import LOOK_BACK, MAX_EVENTS, EventKind, EventLog, LoggedEvent, NullTracer, RunningSession
from router.sessions.snapshot import Snapshot, Totals, WorkerState, WorkerView
from router.sessions.tally import WINDOW_SECONDS, Buckets, Recent, RouterCounters
from router.telemetry.cluster_view import ClusterView
from router.telemetry.metrics import RouterMetrics
from speculation.events import Lost, PeerId, Placed, Role, Start
from speculation.messages import Limits, Load, Open, Sampling, SessionId, Welcome
from speculation.request.session import Session
from tests.structure import ROOT
from transport.tracing import SessionLog

TARGET, DRAFT = PeerId("target@10.0.0.1:7001"), PeerId("draft@10.0.0.2:7002")
WELCOME = Welcome("target", "m", 290, 256, instance="i1", dtype="float32", revision=0xABC, started=900.0)


# Rates


def test_a_steady_rate_is_seen_whatever_the_window_begins_with() -> None:
    recent = Recent(0.0, 0, 0)
    assert recent.rates(0.1) is None
    for tick in range(1, 400):
        now = tick / 10
        recent.add(now, 1, 3)
        if now > 1:
            assert recent.rates(now) == pytest.approx((10.0, 30.0), rel=0.1)


def test_only_the_window_counts() -> None:
    recent = Recent(0.0, 0)
    recent.add(1.0, 1000)
    recent.add(100.0, 5)
    assert recent.growth(100.5) == (5,)
    (rate,) = recent.rates(100.5) or ()
    assert rate == pytest.approx(5 / WINDOW_SECONDS, rel=0.1)
    assert recent.rates(200.0) == (0.0,)


def test_samples_are_bounded_and_equal_a_full_record() -> None:
    seed = Random().getrandbits(32)
    rng = Random(seed)
    recent, record, now = Recent(0.0, 0), [(0.0, 0)], 0.0
    for _ in range(3000):
        now += rng.expovariate(rng.choice((0.3, 100.0)))
        recent.add(now, 1)
        record.append((now, len(record)))
        assert len(recent._samples) < 2 * WINDOW_SECONDS / 0.25, seed
        minimum = record[-1][1] - max(total for at, total in record if at <= now - WINDOW_SECONDS or total == 0)
        # What happened within a sample's length before the window may count.
        maximum = record[-1][1] - max(total for at, total in record if at <= now - WINDOW_SECONDS - 0.25 or total == 0)
        assert minimum <= recent.growth(now)[0] <= maximum, seed


# What happened


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_same_within_a_second_is_one_line_and_the_ring_is_bounded() -> None:
    clock = Clock()
    event_log = EventLog(clock)
    event_log.note(EventKind.WORKER_LOST, "worker a is gone:\n why", TARGET)
    for session in range(1000):
        event_log.note(EventKind.SESSION_REOPENED, f"session {session}", TARGET if session % 2 else DRAFT, session)
    lost, first, second = event_log.lines
    assert (lost.text, lost.times) == ("worker a is gone: why", 1)
    assert (first.session, first.times, second.session, second.times) == (0, 500, 1, 500)
    clock.now += 1.0
    event_log.note(EventKind.SESSION_REOPENED, "later", TARGET, 7)
    assert [line.number for line in event_log.lines] == [1, 2, 3, 4]
    for worker in range(3 * MAX_EVENTS):
        event_log.note(EventKind.WORKER_UP, "x" * 1000, PeerId(str(worker)))
    assert len(event_log.lines) == MAX_EVENTS
    assert event_log.lines[-1].number == 4 + 3 * MAX_EVENTS
    assert len(event_log.lines[-1].text) < 1000
    assert LOOK_BACK < MAX_EVENTS


def test_the_last_line_of_a_worker_says_how_it_is() -> None:
    clock = Clock()
    event_log = EventLog(clock)
    for kind in (EventKind.WORKER_LOST, EventKind.WORKER_UP, EventKind.SESSION_REOPENED, EventKind.WORKER_LOST):
        event_log.note(kind, kind, TARGET)
        event_log.note(EventKind.WORKER_LOST, "another", DRAFT)
        clock.now += 0.3
    of_target = [(line.kind, line.times) for line in event_log.lines if line.worker == TARGET]
    assert of_target == [(EventKind.WORKER_UP, 1), (EventKind.SESSION_REOPENED, 1), (EventKind.WORKER_LOST, 2)]
    assert [line.number for line in event_log.lines] == sorted({line.number for line in event_log.lines})
    assert [(line.kind, line.times) for line in event_log.lines if line.worker == DRAFT] == [(EventKind.WORKER_LOST, 4)]


def test_a_session_that_goes_elsewhere_is_told_by_why() -> None:
    event_log = EventLog()
    session = Session(Open(SessionId(3), 0, (5, 6), Sampling(), Limits(20, frozenset())))
    heard = SessionLog(logging.getLogger(__name__), session.session, "req-1"), RouterCounters().session("m", 2)
    generation = Generation((5, 6), Sampling(), 18, request_id="req-1")
    run = RunningSession(session, generation, None, (), 0.0, *heard, NullTracer(session.session), event_log)
    other = PeerId("target@10.0.0.9:1")

    def placed(peer: PeerId) -> None:
        session.handle(0.0, Placed(Role.TARGET, peer))
        run.opened(peer, Role.TARGET, Open(SessionId(3), 1, (5, 6), Sampling(), Limits(20, frozenset())))

    session.handle(0.0, Start())
    placed(TARGET)
    assert not event_log.lines, "a first opening is no news"
    session.handle(0.0, Lost(TARGET))
    placed(other)
    (line,) = event_log.lines
    assert (line.kind, line.worker, line.session, line.request) == (EventKind.SESSION_REOPENED, other, 3, "req-1")
    run.note(EventKind.SESSION_CONDEMNED, "was given up", other)
    session.drafting.strikes[DRAFT] = ["no q"] * 3
    run.over()
    assert [line.kind for line in event_log.lines[1:]] == [EventKind.SESSION_CONDEMNED, EventKind.DRAFTER_QUARANTINED]


def test_workers_that_come_and_go_are_told_of_once_each() -> None:
    clock = Clock()
    ignore = PoolEvents(lambda _: None, lambda *_: None, lambda *_: None, lambda *_: None)
    pool = WorkerPool(ignore, clock=clock, event_log=EventLog(clock))
    peer = pool.peers[TARGET] = Peer(TARGET, Role.TARGET, pool)

    def kinds() -> list[EventKind]:
        return [line.kind for line in pool.event_log.lines]

    peer.down("never up")
    assert kinds() == []
    peer.up(WELCOME)
    for tick in range(41):
        clock.now = 1001.0 + tick / 4
        peer.received(Load(counters={"steps": 5 * tick, "committed": 20 * tick, "offered": 9}))
    view = WorkerView.of(peer, None)
    assert view.rates == pytest.approx((20.0, 80.0), rel=0.1)
    assert view.since == 1000.0
    peer.received(Load(draining=True))
    peer.received(Load(draining=True))
    assert WorkerView.of(peer, None).since == clock.now
    peer.prefixes.note((1, 2))
    peer.down("it ended")
    peer.up(WELCOME)
    assert peer.prefixes.known_tokens((1, 2)), "it is the same one"
    assert WorkerView.of(peer, None).rates is None, "a new start counts from zero"
    peer.down("cut")
    peer.up(replace(WELCOME, instance="i2"))
    assert not peer.prefixes.known_tokens((1, 2)), "another one has an empty cache"
    peer.down("cut")
    assert kinds() == [
        EventKind.WORKER_UP,
        EventKind.WORKER_DRAINING,
        EventKind.WORKER_GONE,
        EventKind.WORKER_UP,
        EventKind.WORKER_LOST,
    ]


# Quantiles


def test_a_quantile_lies_in_its_bucket() -> None:
    buckets = Buckets((1.0, 2.0, 4.0))
    assert buckets.quantile(0.5) is None
    for value in (0.5, 1.5, 1.6, 3.0):
        buckets.add(value)
    assert buckets.quantile(0.25) == 1.0
    assert buckets.quantile(0.5) == 1.5
    assert buckets.quantile(1.0) == 4.0
    buckets.add(100.0, times=50)
    assert buckets.quantile(0.9) == 4.0, "beyond the last bound nothing is known"


# The whole


def view_of(snapshot: Snapshot, tally: RouterCounters | None = None) -> ClusterView:
    return ClusterView(RouterMetrics(tally or RouterCounters(lambda: 50.0), lambda: snapshot), lambda: 1050.0)


def test_a_router_that_knows_nothing_has_a_view() -> None:
    view = view_of(Snapshot())()
    assert json.loads(encode(view)) == view
    assert (view["router"]["ready"], view["router"]["unready"]) == (False, "no target worker is known")
    assert view["router"]["now"]["acceptance"] is None
    assert (view["models"], view["workers"], view["events"]) == ([], [], [])


def test_uptime_does_not_follow_the_clock_on_the_wall() -> None:
    """That is set: right after a start, or back."""
    now, wall = [50.0], [1050.0]
    view = ClusterView(RouterMetrics(RouterCounters(lambda: now[0]), Snapshot), lambda: wall[0])
    now[0] += 7.0
    for wall[0] in (1050.0 - 3600.0, 1057.0, 1050.0 + 3600.0):
        told = view()["router"]
        assert (told["started"], told["uptime_seconds"]) == (1050.0, 7.0)


def test_everything_known_is_in_the_view() -> None:
    counters = {
        "step_microseconds": 3_000_000,
        "wait_microseconds": 1_000_000,
        "offered": 10,
        "accepted": 4,
        "offered_from_lookup": 10,
        "accepted_from_lookup": 4,
    }
    load = Load(sessions=3, waiting=2, free_tokens=25, capacity_tokens=100, counters=counters)
    target = WorkerView(
        TARGET, Role.TARGET, WorkerState.UP, "m", load, 0.002, WELCOME, 1, since=20.0, rates=(5.0, 20.0)
    )
    snapshot = Snapshot(
        workers=(
            WorkerView(DRAFT, Role.DRAFT, WorkerState.DOWN),
            replace(target, worker=PeerId("target@10.0.0.9:1"), state=WorkerState.DOWN, load=Load(), rates=None),
            target,
        ),
        models=(ServedModel("m", 290, 256, 1),),
        logged_events=(LoggedEvent(7, 1049.0, EventKind.WORKER_UP, "up", TARGET),),
        totals=Totals(sessions=4, reopened=2),
        running=3,
        placing=1,
    )
    tally = RouterCounters(lambda: 50.0)
    record = tally.session("m", prompt=7)
    for now, tokens, accepted, offered in ((49.0, 1, 0, 0), (49.5, 3, 2, 4)):
        record.committed(now, tokens, accepted, offered, cached=5)
    view = view_of(snapshot, tally)()
    assert json.loads(encode(view)) == view
    assert view["router"]["sessions"] == {"running": 3, "placing": 1, "queued": 2}
    assert view["router"]["now"]["acceptance"] == 0.5
    assert view["router"]["now"]["tokens_per_second"] == pytest.approx(4 / WINDOW_SECONDS, rel=0.1)
    assert (view["totals"]["generated_tokens"], view["totals"]["reopened"]) == (4, 2)
    (model,) = view["models"]
    assert (model["targets_up"], model["mean_acceptance_length"]) == (1, 3.0)
    assert model["acceptance_by_position"] == [1.0, 1.0]
    assert 0 < (model["inter_token"]["median_ms"] or math.nan) < 1000
    up, lost, never = view["workers"]
    assert [worker["state"] for worker in (up, lost, never)] == ["up", "lost", "connecting"]
    assert up["address"] == "10.0.0.1:7001"
    assert (up["acceptance"], up["efficiency"], up["round_trip_ms"], up["since"]) == (0.4, 0.75, 2.0, 1020.0)
    assert up["sources"] == {"lookup": {"offered": 10, "accepted": 4}}
    assert (up["revision"], up["started"]) == ("0000000000000abc", 900.0)
    assert (lost["model"], never["model"], never["started"]) == ("m", "", None)
    assert view["events"][0] == {
        "number": 7,
        "time": 1049.0,
        "kind": "worker_up",
        "text": "up",
        "worker": TARGET,
        "session": None,
        "request": "",
        "times": 1,
    }


def test_a_request_that_ran_out_of_time_has_failed_and_one_without_a_place_was_refused() -> None:
    tally = RouterCounters()
    for code in ("timeout", "timeout", "overloaded"):
        tally.answered(CODES[code])
    totals = view_of(Snapshot(totals=Totals(failed=1)), tally)()["totals"]  # the session that found no place
    assert (totals["failed"], totals["refused"]) == (2, 1)


def fields_of(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from fields_of(inner)
    if isinstance(value, list):
        for inner in value:
            yield from fields_of(inner)


def test_every_field_of_the_view_is_documented() -> None:
    snapshot = Snapshot(
        workers=(WorkerView(DRAFT, Role.DRAFT, WorkerState.DOWN),),
        models=(ServedModel("m", 290, 256, 1),),
        logged_events=(LoggedEvent(7, 1049.0, EventKind.WORKER_UP, "up", TARGET),),
    )
    text = (ROOT / "docs" / "alerts.md").read_text()
    documented = set(re.findall(r"`(\w+)`", text.partition("## The view of the cluster")[2].partition("\n## ")[0]))
    assert not set(fields_of(view_of(snapshot)())) - documented


def documented_parts() -> dict[str, set[str]]:
    """The fields of each part of the view, by the page's table."""
    found: dict[str, set[str]] = {}
    part = ""
    text = (ROOT / "docs" / "alerts.md").read_text().partition("## The view of the cluster")[2].partition("\n## ")[0]
    for row in re.findall(r"^\| (?!part|-).*$", text, re.MULTILINE):
        about, fields, _ = (re.findall(r"`(\w+)`", cell) for cell in row.strip("|").split("|"))
        part = about[0] if about else part
        found[part] = found.get(part, set()) | set(fields)
    return found


def test_a_part_of_the_view_has_the_fields_that_the_page_gives_it_and_no_others() -> None:
    view = view_of(
        Snapshot(
            workers=(WorkerView(TARGET, Role.TARGET, WorkerState.UP),),
            models=(ServedModel("m", 290, 256, 1),),
            logged_events=(LoggedEvent(7, 1049.0, EventKind.WORKER_UP, "up", TARGET),),
        )
    )()
    parts = {part: value[0] if isinstance(value, list) else value for part, value in view.items()}
    assert documented_parts() == {part: set(value) for part, value in parts.items() if isinstance(value, dict)}


def test_what_drafters_bring_a_target_counts_before_what_it_finds_itself() -> None:
    load = Load(counters={"offered": 100, "accepted": 62, "offered_from_lookup": 80, "accepted_from_lookup": 59})
    target = WorkerView(TARGET, Role.TARGET, WorkerState.UP, "m", load, acceptance=0.15)
    drafter = WorkerView(DRAFT, Role.DRAFT, WorkerState.UP, "d", acceptance=0.15)
    assert [worker["acceptance"] for worker in view_of(Snapshot((target, drafter)))()["workers"]] == [0.15, 0.15]
    alone = replace(target, acceptance=None)
    assert view_of(Snapshot((alone,)))()["workers"][0]["acceptance"] == 0.62
