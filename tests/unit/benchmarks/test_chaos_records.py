"""The bookkeeping of ``paceline bench chaos`` can fail: whatever goes wrong for a client is counted."""

import asyncio
import json

import pytest

from benchmarks.chaos import scenarios
from benchmarks.chaos.faults import times_lost
from benchmarks.chaos.routers import BREAK_SECONDS, NOTICED_SECONDS, noticed, objections, too_short
from benchmarks.chaos.run import Footprint, against_growth, schedule
from benchmarks.chaos.settings import ChaosOptions, body
from benchmarks.chaos.stage import Stage
from benchmarks.chaos.workload import FaultResult, Reply, Requirement, Workload, tally
from benchmarks.harness.proxy import Proxy
from benchmarks.serve.client import BUSY_LATER
from cluster.cli import main
from speculation.events import Role

RIGHT = "one two three four"
PARTS = ["one ", "two ", "three ", "four"]


class FakeServer:
    """Answers each request with the next script: pieces of a raw HTTP answer, seconds to wait, or an end at once."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.replies = []

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_error):
        self.server.close()
        await self.server.wait_closed()

    async def _serve(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(head.split("content-length: ")[1].split()[0]))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        for number, step in enumerate(script):
            if isinstance(step, float):
                await self._heard(sum(str(said).startswith("data: ") for said in script[:number]))
                await asyncio.sleep(step)
            else:
                writer.write(step.encode())
                await writer.drain()
        writer.close()

    async def _heard(self, events):
        """Until the client has noted all events so far: it may be late, and a silence shorter then."""
        async with asyncio.timeout(60):
            while len(self.replies[-1].times) < events:
                await asyncio.sleep(0.005)


def head(status: int = 200, *headers: str) -> str:
    kind = "content-type: text/event-stream"
    return "\r\n".join([f"HTTP/1.1 {status} Whatever", "connection: close", kind, *headers, "", ""])


def event(document: object) -> str:
    return f"data: {json.dumps(document)}\n\n"


def piece(text: str) -> str:
    return event({"choices": [{"text": text}]})


DONE = "data: [DONE]\n\n"
GOOD = [head(), *map(piece, PARTS), DONE]


async def counted(*scripts, finish=5.0):
    """What a workload of one stream counts. It is stopped as soon as every script was asked for."""
    async with FakeServer(*scripts) as server, Workload(server.url, [body("p", 4, 1, 0.8)], 1) as load:
        server.replies = load.replies
        async with asyncio.timeout(60):
            while len(load.replies) < len(scripts):
                await asyncio.sleep(0.005)
        await load.finish(finish)
    return tally(load.replies[: len(scripts)], {0: RIGHT})


BROKEN_OFF = [head(), piece("one "), event({"error": {"code": "overloaded"}})]


@pytest.mark.parametrize(
    ("script", "failed", "different", "words"),
    [
        (GOOD, 0, 0, ""),
        ([head(), piece("one "), piece("too"), DONE], 0, 1, "from character 5 on: 'oo' instead of 'wo three four'"),
        ([head(), *map(piece, [*PARTS, "five"]), DONE], 0, 1, "from character"),
        ([head(), *map(piece, PARTS[:3]), DONE], 0, 1, "from character"),
        (BROKEN_OFF, 1, 0, "overloaded"),
        ([head(), piece("two "), *BROKEN_OFF[2:]], 1, 1, "overloaded"),
        ([head(), *map(piece, PARTS)], 1, 0, "stream cut short"),
        ([head(200, "transfer-encoding: chunked"), "5\r\ndata:"], 1, 0, "connection lost"),
        ([head(503)], 1, 0, "HTTP 503"),
        ([head(429)], 1, 0, "HTTP 429: "),
        ([head(400), "no such field"], 1, 0, "no such field"),
        ([""], 1, 0, "connection lost"),
    ],
)
async def test_what_fails_or_differs_is_counted_and_a_text_may_be_cut_short_only_by_a_failure(
    script, failed, different, words
):
    found = await counted(script)
    assert (found.requests, found.refused, found.failed, found.different) == (1, 0, failed, different)
    assert words in found.complaints[0] if words else not found.complaints


async def test_a_stream_that_never_completes_has_failed():
    found = await counted([head(), piece("one "), 30.0], finish=0.1)
    assert (found.failed, found.different) == (1, 0)
    assert "not complete within" in found.complaints[0]


async def test_a_refusal_before_acceptance_is_no_failure_and_the_request_is_made_again():
    found = await counted([head(429, "retry-after: 0")], GOOD)
    assert (found.requests, found.refused, found.failed, found.different) == (2, 1, 0, 0)


async def test_a_silence_is_measured():
    found = await counted([head(), 0.1, piece("one "), 0.3, *map(piece, PARTS[1:]), DONE])
    assert found.silence.seconds >= 0.29
    assert found.first_token >= 0.09


async def test_a_silence_before_the_end_is_measured():
    assert (await counted([head(), *map(piece, PARTS), 0.3, DONE])).silence.seconds >= 0.29


async def test_streams_are_asked_for_again_until_there_are_to_be_fewer():
    requests = [body("p", 4, seed, 0.8) for seed in range(2)]
    async with FakeServer(GOOD) as server, Workload(server.url, requests, 3) as load:
        async with asyncio.timeout(60):
            while len(load.replies) < 9:
                await asyncio.sleep(0.005)
        await load.finish(5)
        asked = len(load.replies)
        await asyncio.sleep(0.05)
    assert len(load.replies) == asked
    assert {reply.number for reply in load.replies} == {0, 1}
    assert not any(reply.error for reply in load.replies)


def outcome(wanted: Requirement, *replies: Reply) -> FaultResult:
    return FaultResult(1, tally(replies, {0: RIGHT}), wanted=wanted)


def complete(*chunks: float) -> Reply:
    return Reply(0, times=list(chunks), text=RIGHT, ended=chunks[-1])


def test_a_row_holds_only_with_a_short_enough_silence_and_something_asked_for():
    assert outcome(Requirement("", 1.0), complete(0.5, 1.4, 2.3)).holds
    assert outcome(Requirement(""), complete(0.5, 9.0)).holds
    assert outcome(Requirement("", 1.0), complete(0.5, 1.6)).problems == ["a silence of 1.10 s, wanted under 1 s"]
    assert outcome(Requirement("")).problems == ["nothing was asked for"]


def test_a_row_holds_with_requests_refused_only_where_there_are_more_streams_than_places():
    refused = [Reply(0, error=BUSY_LATER, ended=0.1)] * 99
    assert outcome(Requirement("", refusals=True), complete(0.5), *refused).holds
    assert outcome(Requirement(""), complete(0.5), *refused).problems == ["99 requests were refused"]
    rows = scenarios.scenarios(ChaosOptions())
    assert [row.name for row in rows if row.wanted.refusals] == ["overload"]


def test_a_row_does_not_hold_with_a_failure_or_anything_else_to_complain_of():
    assert not outcome(Requirement(""), complete(1.0), Reply(0, error="HTTP 503", ended=1.0)).holds
    late = outcome(Requirement(""), complete(1.0))
    late.complaints.append("not whole again")
    assert not late.holds


def test_a_schedule_of_faults_follows_from_its_seed():
    assert schedule(1, 600) == schedule(1, 600) != schedule(2, 600)
    assert schedule(1, 60) == schedule(1, 600)[: len(schedule(1, 60))]
    assert 70 < len(schedule(1, 600)) < 210


@pytest.mark.parametrize(
    ("seen", "objections"),
    [
        ([1, *[2] * 9, 1], []),
        ([1, 2, *[3] * 10, 2, 1], []),
        ([1, *[2] * 8, 1], ["flapped"]),
        ([1, *[2] * 20, *[1] * 20, *[2] * 20, 1], ["flapped"]),
        ([1, 2, 2], ["did not follow"]),
        ([2, 2], ["did not follow"]),
    ],
)
def test_a_pool_that_flaps_or_stays_is_noticed(seen, objections):
    found = scenarios.objections(Role.TARGET, seen)
    assert [what.removeprefix("the target pool ").partition(":")[0] for what in found] == objections


def test_drafters_may_be_wanted_on_the_way_up_and_down_and_not_at_the_peak():
    two = [1, *[2] * 20, *[1] * 20, *[2] * 20]
    assert scenarios.objections(Role.DRAFT, [*two, 1]) == []
    assert len(scenarios.objections(Role.DRAFT, [*two, *[1] * 20, *[2] * 20, 1])) == 1
    assert len(scenarios.objections(Role.DRAFT, [1, *[2] * 20, *[1] * 5, *[2] * 20, 1])) == 1


def test_memory_and_sockets_that_grow_are_noticed():
    before = Footprint({"router": 300, "target": 500}, 40)
    assert not against_growth(before, Footprint({"router": 340, "target": 490}, 45))
    (memory,) = against_growth(before, Footprint({"router": 500, "target": 500}, 40))
    assert memory == "the router takes 500 MB, when warm 300"
    (sockets,) = against_growth(before, Footprint(before.memory, 90))
    assert sockets == "routers have 90 files and sockets open, at the start 40"


def test_the_faults_are_listed(capsys):
    assert main(["bench", "chaos", "--list", "--hang", "5"]) == 0
    assert "stop-draft       SIGSTOP of a drafter for 5 s" in capsys.readouterr().out
    assert main(["bench", "chaos", "--only", "kill"]) == 2
    assert "--only kill: no such fault; there are undisturbed, kill-draft," in capsys.readouterr().err


def reply(text: str = "", *, sent: float, ended: float, error: str = "") -> Reply:
    return Reply(0, sent, sent, ended, text=text, error=error)


BROKEN, WELL = reply("one ", sent=1.0, ended=10.1, error="cut"), reply(RIGHT, sent=2.0, ended=12.0)


@pytest.mark.parametrize(
    ("replies", "words"),
    [
        ([BROKEN, WELL], None),
        ([WELL], "no stream broke"),
        ([BROKEN], "every stream broke"),
        ([BROKEN, WELL, reply(sent=10.2, ended=10.3, error="HTTP 503")], None),
        ([BROKEN, WELL, reply("one", sent=11.0, ended=10.5 + BREAK_SECONDS, error="cut")], "5.5 s after the router"),
        ([BROKEN, WELL, reply("one", sent=1.0, ended=9.0, error="cut")], "-1.0 s after the router"),
        ([BROKEN, WELL, reply("two", sent=1.0, ended=10.1, error="cut")], "from character 0 on"),
    ],
)
def test_only_the_streams_of_a_killed_router_may_break(replies, words):
    found = objections(replies, 10.0, {0: RIGHT})
    assert [words in line for line in found] == ([True] if words else [])


def lost(
    worker: str, number: int, *, times: int = 1, kind: str = "worker_lost", time: float = 0.0
) -> dict[str, object]:
    return {"kind": kind, "worker": worker, "number": number, "times": times, "time": time, "text": "is gone"}


def test_a_drafter_that_is_taken_for_gone_again_and_again_is_noticed():
    events = [
        lost("draft@a", 1),
        lost("draft@a", 2, times=3),
        lost("draft@b", 3),
        lost("draft@a", 4, kind="worker_up"),
        lost("draft@a", 5),
    ]
    assert times_lost(events, "draft@a", 1) == 4
    assert times_lost(events, "draft@a", 5) == 0


@pytest.mark.parametrize(
    ("events", "complaints"),
    [
        ([lost("target@a", 1, time=102.0)], []),
        ([lost("target@b", 1, time=102.0)], ["the stall was not noticed"]),
        (
            [lost("target@a", 1, time=100.1 + NOTICED_SECONDS)],
            ["the stall was noticed after 5.1 s, wanted within 5 s"],
        ),
    ],
)
def test_a_stall_that_is_noticed_late_or_never_is_told(events, complaints):
    assert noticed(events, "target@a", 100.0)[0] == complaints


def test_a_long_stream_that_ends_early_is_told():
    replies = [reply(RIGHT, sent=1.0, ended=140.0), Reply(1, 2.0, 2.0, 129.0)]
    assert too_short(replies, 10.0, 120.0) == ["request 1 went on for 119 s only"]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says something at once, and whatever it hears."""
    writer.write(b"hello\n")
    while line := await reader.readline():
        writer.write(line)
    writer.close()


async def test_a_proxy_holds_back_one_way_and_not_the_other():
    async with (
        asyncio.timeout(60),
        await asyncio.start_server(echo, "127.0.0.1", 0) as server,
        Proxy(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as proxy,
    ):
        host, port = proxy.address.split(":")
        reader, writer = await asyncio.open_connection(host, port)
        assert await reader.readline() == b"hello\n"
        writer.write(b"one\n")
        assert await reader.readline() == b"one\n"
        async with proxy.held():
            writer.write(b"two\n")
            answer = asyncio.create_task(reader.readline())
            other, other_writer = await asyncio.open_connection(host, port)
            assert await other.readline() == b"hello\n"
            other_writer.close()
            assert not answer.done()
        assert await answer == b"two\n"
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()


class Deployments(Stage):
    """Without a cluster: what would be deployed, and that it is waited for."""

    def __init__(self) -> None:
        self._settings = {"router": {"replicas": 1, "port": 0}}
        self.deployed = []

    async def update(self, changes):
        self._settings = self._settings | {name: self._settings.get(name, {}) | part for name, part in changes.items()}
        self.deployed.append(self._settings)

    async def whole(self, seconds=0.0):
        self.deployed.append("whole")
        return 0.0


async def test_a_row_that_fails_leaves_the_cluster_as_it_was_for_the_next():
    stage = Deployments()
    before = stage._settings

    async def row():
        async with stage.changed({"router": {"replicas": 2}, "target": {"standby": 1}}):
            assert stage.setting("router", "replicas") == 2
            await stage.update({"router": {"max_sessions": 41}})
            raise TimeoutError

    with pytest.raises(TimeoutError):
        await row()
    changed = {"router": {"replicas": 2, "port": 0}, "target": {"standby": 1}}
    more = changed | {"router": changed["router"] | {"max_sessions": 41}}
    assert stage.deployed == [changed, "whole", more, before, "whole"]
