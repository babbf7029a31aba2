"""The Ray Serve application on a real local Ray: two targets, two drafters, two routers; workers killed mid-stream."""

import asyncio
import re
import signal

import grpc
import httpx
import psutil
import pytest
import pytest_asyncio

from speculation.messages import Load
from tests.cluster.processes import PATIENCE, STARTS, Paceline
from tests.cluster.streams import TIMEOUT, body, plain, prompts, streamed
from tests.ports import free_port
from transport.client import WorkerConnection
from transport.incoming import Listener

pytestmark = pytest.mark.slow
REPLICAS = ["--target-replicas", "2", "--draft-replicas", "2", "--router-replicas", "2"]
TOKENS = 600


@pytest.fixture(scope="module")
def paceline(slow_target):
    with Paceline("up", "--target", str(slow_target), "--dtype", "fp32", "--port", str(free_port()), *REPLICAS) as up:
        up.expect("Ctrl-C stops it", STARTS)
        yield up
        assert up.stop(signal.SIGINT) == 0


@pytest.fixture(scope="module")
def url(paceline):
    return paceline.expect(r"Paceline serves at (\S+)")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def long(url):
    """Requests long enough to lose a worker meanwhile, and their texts."""
    bodies = [body(prompt, TOKENS, temperature=0.8) for prompt in prompts(3)]
    return bodies, await plain(url, bodies)


def replicas(paceline, kind: str) -> list[psutil.Process]:
    return paceline.descendants(f"ray::ServeReplica:paceline:{kind}")


@pytest.mark.thorough
def test_every_replica_is_a_process_and_listens_on_loopback_only(paceline):
    for kind in ("TargetWorker", "DraftWorker", "Router"):
        assert len(replicas(paceline, kind)) == 2
    for process in replicas(paceline, "TargetWorker") + replicas(paceline, "DraftWorker"):
        assert len(listening(process)) == 1


def test_what_serves_has_the_same_claim_to_the_processor_as_what_starts(paceline):
    """Ray lowers that of its workers, but only once they have started."""
    ray_node = paceline.descendants("raylet")[0]
    for words in ("ray::ServeReplica:paceline:", "ray::ServeController", "ray::ProxyActor"):
        found = paceline.descendants(words)
        assert found, words
        assert {process.nice() for process in found} == {ray_node.nice()}, words


def test_ray_itself_answers_nobody_without_its_token(paceline):
    (service,) = paceline.descendants("gcs_server")
    answers = []
    for port in {c.laddr.port for c in service.net_connections("tcp") if c.status == "LISTEN"}:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo", bytes, bytes)
            answers.append(call.future(b"", timeout=30).code())
    assert grpc.StatusCode.UNAUTHENTICATED in answers
    assert grpc.StatusCode.OK not in answers


async def test_drafted_text_equals_plain_text_and_arrives_bit_by_bit(url):
    bodies = [body(prompt, 60) for prompt in prompts(4)]
    expected = await plain(url, bodies)
    results = await streamed(url, bodies)
    assert [result.text for result in results] == expected
    assert all(result.tokens == 60 and len(result.parts) >= 60 / 13 for result in results)  # 12 drafts a step
    assert sum(result.accepted for result in results) > 0


async def test_both_routers_answer(url):
    seen = set()
    async with asyncio.timeout(PATIENCE):
        while len(seen) < 2:
            async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False) as client:
                models, cluster = [(await client.get(f"{url}/{path}")).json() for path in ("v1/models", "cluster")]
            assert models["data"][0]["id"] == "target"
            seen.add(cluster["router"]["instance"])


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "role"), [("DraftWorker", "draft"), ("TargetWorker", "target")])
async def test_a_worker_killed_mid_stream_does_not_change_the_text(paceline, url, long, kind, role):
    bodies, expected = long
    killed = set()

    async def kill(results):
        before = replicas(paceline, kind)
        loads = await asyncio.gather(*(load_of(process, role) for process in before))
        busiest = max(range(len(before)), key=lambda i: loads[i].sessions)
        assert loads[busiest].sessions > 0
        assert not any(result.done for result in results)
        before[busiest].kill()
        killed.add(before[busiest].pid)

    results = await streamed(url, bodies, kill)
    assert [result.text for result in results] == expected
    assert all(result.done and result.tokens == TOKENS for result in results)
    async with asyncio.timeout(PATIENCE):  # and Serve replaces it
        while len(now := replicas(paceline, kind)) < 2 or not all(listening(process) for process in now):
            await asyncio.sleep(0.2)
    assert not killed & {process.pid for process in now}


async def test_a_client_that_goes_leaves_nothing_running(paceline, url):
    targets = replicas(paceline, "TargetWorker")
    before = [(await load_of(process, "target")).counters["committed"] for process in targets]
    async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False) as client:
        request = {**body(prompts(1)[0], 900), "stream": True, "n": 8}
        async with client.stream("POST", f"{url}/v1/completions", json=request) as response:
            async for _ in response.aiter_lines():
                break
    after = [
        await load_of(process, "target", until=lambda load: not load.sessions and not load.waiting)
        for process in targets
    ]
    assert all(load.free_tokens == load.capacity_tokens for load in after)
    assert sum(load.counters["committed"] for load in after) - sum(before) < 8 * 900, "it went on without its client"


def listening(process: psutil.Process) -> list[int]:
    """Ports of a worker on loopback: its gRPC server's. (Ray's own listen everywhere, behind Ray's token.)"""
    found = [c.laddr for c in process.net_connections("tcp") if c.status == "LISTEN"]
    return [address.port for address in found if address.ip.removeprefix("::ffff:") == "127.0.0.1"]


async def load_of(process: psutil.Process, role: str, until=lambda load: True) -> Load:
    """What a worker says of its load, to a router of its own; the first that fits."""
    heard: asyncio.Queue[Load] = asyncio.Queue()

    class Hearing(Listener):
        def up(self, welcome):
            assert welcome.role == role

        def received(self, message):
            heard.put_nowait(message)

    (port,) = listening(process)
    connection = asyncio.create_task(WorkerConnection(f"127.0.0.1:{port}", role, Hearing()).run())
    try:
        async with asyncio.timeout(PATIENCE):
            while not until(load := await heard.get()):
                pass
        return load
    finally:
        connection.cancel()
        await asyncio.gather(connection, return_exceptions=True)


@pytest.mark.thorough
def test_a_signal_to_all_of_its_processes_ends_it_as_well():
    """Ray would wait a minute for what has ended with it."""
    with Paceline("up", "--port", str(free_port())) as up:
        up.expect("Ctrl-C stops it", STARTS)
        assert up.stop_all(signal.SIGTERM) == 0


@pytest.mark.thorough
def test_when_ray_dies_everything_ends_and_says_so():
    with Paceline("up", "--port", str(free_port())) as up:
        up.expect("Ctrl-C stops it", STARTS)
        up.descendants("raylet")[0].kill()
        assert up.ended() == 1
        up.expect("^paceline: Ray is gone")


@pytest.mark.thorough
def test_a_model_that_cannot_be_loaded_is_told_in_one_line(tmp_path):
    from tests.cluster.test_local import broken_model

    model = broken_model(tmp_path)
    with Paceline("up", "--target", str(model), "--threads", "1", "--port", str(free_port())) as up:
        line = up.expect(r"^paceline: (target cannot start: .*)")
        assert re.fullmatch(rf"target cannot start: {model}: the weights lack \d+ tensors of the model, first .*", line)
        assert up.ended() == 1
