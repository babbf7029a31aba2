"""What operators run beside the services: a router that follows a list of workers, and the doctor looking at both."""

import asyncio
import json
import socket

import pytest

from cluster.doctor import workers
from speculation.events import Role
from tests.cluster.processes import Paceline, run
from tests.ports import free_port
from tests.stack import draft_worker, target_worker


def findings(done):
    assert done.returncode in (0, 1), done.stderr
    return {finding["subject"]: finding for finding in json.loads(done.stdout)}


@pytest.mark.thorough
async def test_a_router_follows_its_list_and_tells_systemd(tmp_path, monkeypatch):
    listed = tmp_path / "workers.txt"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(30)
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        async with target_worker() as target, target_worker() as second, draft_worker() as draft:
            listed.write_text(f"target {target.worker.address}\ndraft {draft.worker.address}\n")
            with Paceline("router", "--workers", str(listed), "--port", str(free_port())) as router:
                url = (await asyncio.to_thread(router.expect, "router ready on (\\S+)")).rstrip("/")
                assert await asyncio.to_thread(systemd.recv, 100) == b"READY=1"
                assert not second.worker._links

                listed.write_text(f"target {second.worker.address}\ndraft {draft.worker.address}\n")
                async with asyncio.timeout(60):
                    while target.worker._links or not second.worker._links:
                        await asyncio.sleep(0.01)

                asked = ["doctor", "--workers", str(listed), "--url", url, "--target-step-ms", "30", "--json"]
                found = findings(await asyncio.to_thread(run, *asked, timeout=180))
                assert "problem" not in {finding["level"] for finding in found.values()}, found
                assert "round trip" in found[f"target {second.worker.address}"]["text"]
                assert "times as fast as plain decoding" in found["distance"]["text"]
                assert " tokens at " in found[f"http {url}"]["text"]
                assert "differs" not in found[f"http {url}"]["text"]
            assert await asyncio.to_thread(systemd.recv, 100) == b"STOPPING=1"


async def test_workers_of_the_other_role_mute_and_missing(monkeypatch):
    monkeypatch.setattr(workers, "WELCOME_SECONDS", 0.5)
    async with draft_worker() as draft:
        with socket.socket() as mute:
            mute.bind(("127.0.0.1", 0))
            mute.listen()
            silent, missing = f"127.0.0.1:{mute.getsockname()[1]}", f"127.0.0.1:{free_port()}"
            met = await workers.meet_all({Role.TARGET: [draft.worker.address, missing], Role.DRAFT: [silent]})
    told = [str(finding) for finding in workers.judge(met)]
    assert all(line.startswith("problem") for line in told)
    other = "is a draft worker; list it as --draft"
    for line, words in zip(told, (other, "Connection refused", "not introduce", "no target"), strict=True):
        assert words in line


def test_the_doctor_looks_at_this_machine_without_arguments():
    found = findings(run("doctor", "--json", "--set", f"router.port={free_port()}", timeout=120))
    assert {
        "python",
        "versions",
        "model of target",
        "model of draft",
        "vocabulary of draft",
        "gpu",
        "memory",
        "port",
    } <= found.keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "target.replicas=x"], ["configuration: --set: target.replicas must be a whole number"]),
        (
            ["--set", "target.model=/nowhere", "--address", "127.0.0.1:1"],
            ["model of target: model /nowhere: no such", "ray: no Ray cluster at 127.0.0.1:1 (Connection refused)"],
        ),
    ],
)
def test_the_doctor_says_what_is_wrong_and_goes_on(arguments, words):
    done = run("doctor", *arguments, timeout=120)
    assert done.returncode == 1
    for said in words:
        assert f"problem  {said}" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["doctor", "--target", "7001"], "'7001' is not HOST:PORT"),
        (["doctor", "--workers", "/nowhere"], "--workers /nowhere: cannot be read"),
        (["doctor", "--acceptance", "2"], "--acceptance 2: must be above 0 and at most 1"),
        (["router", "--workers", "/nowhere"], "--workers /nowhere: cannot be read"),
        (["router", "--workers", "x", "--target", "127.0.0.1:1"], "either --workers or --target"),
        (["up", "--detach"], "--detach leaves the application on a running Ray cluster"),
        (["down"], "give the Ray cluster"),
        (["down", "--address", "127.0.0.1:1"], "no Ray cluster at 127.0.0.1:1"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments, words):
    refused = run(*arguments)
    assert refused.returncode in (1, 2)
    assert refused.stdout == ""
    assert words in refused.stderr.splitlines()[-1]
    assert "Traceback" not in refused.stderr
