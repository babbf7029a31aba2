"""The door between routers and workers, with TLS: who gets in, who does not, and what a renewal changes."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta

import grpc
import pytest

from cluster.certificates import now, write_roles
from cluster.cli import main
from cluster.doctor import workers
from protos.paceline.v1 import worker_pb2_grpc as rpc
from router.dispatch import Dispatcher
from speculation.events import Role
from speculation.messages import SessionId, Verification
from tests.certificates import Authority
from tests.integration.test_transport import OPEN, WELCOME, Echo, Heard
from transport.client import CHANNEL_OPTIONS, WorkerConnection
from transport.tls import TARGET_NAME, Identity
from transport.worker import Door, Worker

TWO_DAYS = timedelta(days=2)


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Authority:
    return Authority.made(tmp_path_factory.mktemp("ours") / "certs")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Authority:
    return Authority.made(tmp_path_factory.mktemp("theirs") / "certs")


@asynccontextmanager
async def listening(identity: Identity | None, machine: Echo, role: str = "target"):
    worker = Worker(machine, role)
    await worker.start(await Door.open(role, "127.0.0.1:0", identity))
    try:
        yield worker.address
    finally:
        await worker.stop()


@asynccontextmanager
async def connecting(address: str, identity: Identity | None, role: str = "target"):
    """A router's connection, and what it hears."""
    heard = Heard()
    connection = WorkerConnection(address, role, heard, identity=identity)
    task = asyncio.create_task(connection.run())
    try:
        yield connection, heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def logged(caplog, words: str) -> str:
    """The first line of the log with these words."""
    async with asyncio.timeout(60):
        while True:
            for record in caplog.records:
                if words in record.getMessage():
                    return record.getMessage()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_router_and_a_worker_that_know_each_other_talk(ours, role):
    async with listening(ours.identity(role), Echo(), role) as address:
        async with connecting(address, ours.identity("router"), role) as (connection, heard):
            assert await heard.next() == WELCOME
            connection.send(OPEN)
            assert isinstance(await heard.next(), Verification)


async def test_a_worker_that_is_listed_under_the_other_role_is_told_apart(ours, caplog):
    async with listening(None, Echo(), "draft") as address, connecting(address, None) as (_, heard):
        assert (await logged(caplog, "cannot reach")).endswith("(it is no target worker)")
        assert heard.events.empty()


@pytest.mark.parametrize("role", [Role.TARGET, Role.DRAFT])
@pytest.mark.parametrize("secure", [False, True])
async def test_the_doctor_finds_a_worker_that_is_listed_under_the_other_role(ours, monkeypatch, role, secure):
    monkeypatch.setattr(workers, "WELCOME_SECONDS", 2.0)
    (other,) = set(Role) - {role}
    machine = Echo(welcome_of=replace(WELCOME, role=other.value))
    known = [ours.identity(name) if secure else None for name in (other.value, "router")]
    async with listening(known[0], machine, other.value) as address:
        found = list(map(str, workers.judge([await workers.meet(role, address, known[1])])))
    assert f"problem  {role} {address}: is a {other} worker; list it as --{other}" in found


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
@pytest.mark.parametrize("secure", [False, True])
async def test_no_proxy_of_the_environment_stands_before_a_worker(ours, monkeypatch, variable, secure):
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    known = [ours.identity(role) if secure else None for role in ("target", "router")]
    async with listening(known[0], Echo()) as address, connecting(address, known[1]) as (_, heard):
        assert await heard.next() == WELCOME


@pytest.mark.parametrize(
    "stranger",
    [
        pytest.param(lambda ours, theirs: None, id="plain text"),
        pytest.param(lambda ours, theirs: theirs.held("router", trusting=ours), id="another authority"),
        pytest.param(lambda ours, theirs: ours.held("router", TWO_DAYS), id="expired"),
        pytest.param(lambda ours, theirs: ours.held("router", -TWO_DAYS), id="not yet valid"),
        pytest.param(lambda ours, theirs: ours.held("target"), id="a target"),
    ],
)
async def test_a_worker_lets_no_stranger_in(ours, theirs, stranger, caplog):
    async with listening(ours.identity("target"), Echo()) as address:
        async with connecting(address, stranger(ours, theirs)) as (_, heard):
            assert "UNAVAILABLE" in await logged(caplog, f"cannot reach target worker {address}: ")
            assert heard.events.empty()


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["draft.paceline"], "draft.paceline"),
        (["*.paceline"], "*.paceline"),
        (["xrouter.paceline", "router.paceline.example"], "xrouter.paceline, router.paceline.example"),
        ([], "no DNS name"),
    ],
)
async def test_a_worker_serves_nobody_but_routers(ours, names, found, caplog):
    """Also if their certificate is meant for clients, and the common name is a router's."""
    async with listening(ours.identity("target"), Echo()) as address:
        async with connecting(address, ours.held_for(*names)) as (_, heard):
            words = f"its certificate is for {found}, not for router.paceline"
            assert (await logged(caplog, "refused ipv4:127.0.0.1")).endswith(words)
            assert (await logged(caplog, "cannot reach")).endswith(f"PERMISSION_DENIED: {words}")
            assert heard.events.empty()


async def test_a_worker_lets_nobody_in_without_a_certificate(ours):
    credentials = grpc.ssl_channel_credentials(ours.issued.certificate_pem)
    options = [*CHANNEL_OPTIONS, (TARGET_NAME, "target.paceline")]
    async with listening(ours.identity("target"), Echo()) as address:
        async with grpc.aio.secure_channel(address, credentials, options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async with asyncio.timeout(60):
                    await rpc.TargetStub(channel).Run().read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "stranger",
    [
        pytest.param(lambda ours, theirs: None, id="plain text"),
        pytest.param(lambda ours, theirs: theirs.held("target", trusting=ours), id="another authority"),
        pytest.param(lambda ours, theirs: ours.held("target", TWO_DAYS), id="expired"),
        pytest.param(lambda ours, theirs: ours.held("draft"), id="a draft"),
        pytest.param(lambda ours, theirs: ours.held("router"), id="a router"),
    ],
)
async def test_a_router_talks_to_no_stranger(ours, theirs, stranger, caplog):
    async with listening(stranger(ours, theirs), Echo()) as address:
        async with connecting(address, ours.identity("router")) as (_, heard):
            assert "UNAVAILABLE" in await logged(caplog, f"cannot reach target worker {address}: ")
            assert heard.events.empty()


@pytest.fixture
def identity_of_the_doctor(ours, monkeypatch) -> Identity | None:
    """As whom it meets workers, where there are certificates."""
    given: list[Identity | None] = []

    async def met(_addresses: object, identity: Identity | None = None) -> list[workers.Met]:
        given.append(identity)
        return []

    monkeypatch.setattr(workers, "meet_all", met)
    files = {"certificate": "{role}.crt", "key": "{role}.key", "authority": "ca.crt"}
    settings = [f"--set=security.{name}={ours.folder}/{file}" for name, file in files.items()]
    main(["doctor", "--target", "127.0.0.1:1", *settings])
    (identity,) = given
    return identity


async def test_the_doctor_meets_workers_as_a_router_does(ours, identity_of_the_doctor, monkeypatch):
    """A worker says nothing to others."""
    async with listening(ours.identity("target"), Echo()) as address:
        monkeypatch.setattr(workers, "WELCOME_SECONDS", 60.0)
        assert (await workers.meet(Role.TARGET, address, identity_of_the_doctor)).welcome == WELCOME
        monkeypatch.setattr(workers, "WELCOME_SECONDS", 0.5)
        assert (await workers.meet(Role.TARGET, address, None)).welcome is None


async def test_why_a_worker_cannot_be_reached_is_said_once(ours, caplog):
    async with listening(ours.identity("draft"), Echo()) as address:
        connection = WorkerConnection(address, "target", Heard(), identity=ours.identity("router"))
        # On a busy machine gRPC may have seen no more than the end of a refused handshake when an attempt ends.
        async with asyncio.timeout(60):
            while not any("Hostname Verification Check failed" in line for line in caplog.messages):
                assert not (await connection._attempt()).up
        for _ in range(3):
            assert not (await connection._attempt()).up
    assert len(set(caplog.messages)) == len(caplog.messages)


def test_every_reason_why_a_worker_cannot_be_reached_is_said_once_until_it_was(caplog):
    connection = WorkerConnection("10.0.0.1:1", "target", Heard())
    for why, was_up in (("a", False), ("b", False), ("a", False), ("gone", True), ("a", False)):
        connection._note(why, was_up=was_up)
    assert [line.rpartition(" ")[2] for line in caplog.messages] == ["a", "b", "a"]
    caplog.clear()
    for number in range(100):
        connection._note(f"reason {number}", was_up=False)
    assert len(caplog.messages) < 10


async def test_a_renewal_counts_for_new_connections_and_leaves_streams_alone(tmp_path, caplog):
    old = Authority.made(tmp_path / "certs")
    router = old.identity("router")
    machine = Echo()
    async with listening(old.identity("target"), machine) as address, connecting(address, router) as (before, heard):
        assert await heard.next() == WELCOME
        new = Authority.made(tmp_path / "new")
        shutil.copytree(new.folder, old.folder, dirs_exist_ok=True)
        for identity in (router, new.held("router")):
            async with connecting(address, identity) as (_, again):
                assert await again.next() == WELCOME
        async with connecting(address, old.held("router", trusting=new)) as (_, refused):
            await logged(caplog, f"cannot reach target worker {address}: ")
            assert refused.events.empty()
        for number in (1, 2):
            before.send(replace(OPEN, session=SessionId(number)))
            assert isinstance(await heard.next(), Verification)
        assert heard.events.empty()
        assert len(machine.held) == 2


def test_certificates_are_replaced_only_where_they_were_renewed(tmp_path, monkeypatch):
    """Each replacement is a moment in which gRPC may read what it has just freed: many connections at once end it."""
    given = []
    monkeypatch.setattr("transport.tls.grpc.dynamic_ssl_server_credentials", lambda *found, **_: given.append(found))
    authority = Authority.made(tmp_path / "certs")
    authority.identity("target").server_credentials()
    ((_, renewed),) = given
    assert [renewed() for _ in range(3)] == [None] * 3
    write_roles(authority.folder, authority.issued, now())
    assert renewed() is not None
    assert renewed() is None


async def test_files_that_cannot_be_used_leave_the_earlier_ones_in_use(tmp_path, caplog):
    authority = Authority.made(tmp_path / "certs")
    identity, router = authority.identity("target"), authority.identity("router")
    before = identity.current()
    shutil.copy(authority.folder / "draft.key", authority.folder / "target.key")  # as halfway through a renewal
    async with listening(identity, Echo()) as address:
        for _ in range(2):
            async with connecting(address, router) as (_, heard):
                assert await heard.next() == WELCOME
    assert identity.current() == before
    key, certificate = authority.files("target").key, authority.files("target").certificate
    words = f"key {key}: is not the key of the certificate {certificate}; what was read before stays in use"
    assert caplog.messages == [words]
    write_roles(authority.folder, authority.issued, now())
    assert identity.current() != before


def test_a_router_tells_when_its_certificate_ends(ours):
    told, _ = Dispatcher(identity=ours.identity("router")).metrics.exposition()
    for file in ours.identity("router").certificates:
        assert f'paceline_certificate_expiry_timestamp_seconds{{file="{file}"}}'.encode() in told
