"""Workers of two ranks on a real Ray of pretend nodes: where they are placed, what they say, what a death leaves."""

import asyncio
import os
import re
import signal
import subprocess
import sys

import httpx
import psutil
import pytest
from tokenizers import Tokenizer

from speculation.messages import Sampling
from tests.cluster.pretend_nodes import ENVIRONMENT, LARGE, SMALL
from tests.cluster.processes import CHECKOUT, PATIENCE, STARTS, Paceline, run, running
from tests.cluster.streams import TIMEOUT, body, prompts, streamed
from tests.ports import free_port
from tests.ranks import needs_no_gpu
from tests.stack import MODELS, decode, dispatcher, held_out_prompts, target_worker

pytestmark = [pytest.mark.slow, pytest.mark.thorough, needs_no_gpu]
TOKENS = 250
SETTINGS = """\
target: {tensor_parallel_size: 2, gpus: 1, device: cpu, gpu_class: large, dtype: fp32}
draft: {tensor_parallel_size: 2, gpu_class: small, dtype: fp32}
ray: {placement_timeout: 120}
"""


class Nodes:
    """The cluster, and the processes of its replicas."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.pretend_nodes"],
            cwd=CHECKOUT,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout
        self.address = self.process.stdout.readline().strip()

    def find(self, words: str) -> list[psutil.Process]:
        """Processes that Ray titles so. Ray names a process by what it runs at the moment."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if words in " ".join(process.cmdline()):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                pass
        return found

    def group(self, role: str) -> list[psutil.Process]:
        """The replica of the only worker of a role, then its other rank."""
        kind = {"target": "TargetWorker", "draft": "DraftWorker"}[role]
        return self.find(f"ray::ServeReplica:paceline:{kind}") + self.find(f"ray::paceline:{role}:rank 1")

    def stop(self) -> None:
        everything = psutil.Process(self.process.pid).children(recursive=True)
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        assert self.process.wait(PATIENCE) == 0
        self.process.stdout.close()
        assert not running(everything, PATIENCE)


@pytest.fixture(scope="module")
def nodes():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        nodes = Nodes()
        try:
            yield nodes
        finally:
            nodes.stop()


@pytest.fixture(scope="module")
def settings(nodes, tmp_path_factory):
    file = tmp_path_factory.mktemp("ranks") / "paceline.yaml"
    file.write_text(SETTINGS)
    return ["--address", nodes.address, "--config", str(file), "--port", str(free_port())]


@pytest.fixture(scope="module")
def url(settings):
    with Paceline("up", *settings) as up:
        up.expect("Ctrl-C stops it", STARTS)
        yield up.expect(r"Paceline serves at (\S+)")
        assert up.stop(signal.SIGINT) == 0


@pytest.fixture(scope="module")
async def one_rank() -> list[str]:
    """What a worker of one rank says to the prompts of these tests."""
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    sampling = Sampling(temperature=0.8, seed=7)
    async with target_worker() as target, dispatcher([target.worker.address]) as serving:
        results = [await decode(serving, prompt, TOKENS, sampling) for prompt in held_out_prompts()[:2]]
    return [tokenizer.decode(result.tokens) for result in results]


def test_a_group_that_no_node_can_hold_is_refused(settings):
    """The two nodes have three GPUs together."""
    refused = run("up", *settings, "--tensor-parallel-size", "3", "--no-speculation")
    assert refused.returncode == 1
    line = r"paceline: Ray has no room for 1 x target of 3 ranks on one node with 0.1 CPU, 1 GPU, .*: only 0 fit on .*"
    assert re.fullmatch(line, refused.stderr.splitlines()[-1])


@pytest.mark.parametrize(("role", "rank", "node"), [("target", 1, LARGE), ("draft", 0, SMALL)])
async def test_a_rank_killed_mid_stream_takes_its_group_along_and_the_text_goes_on(
    nodes, url, one_rank, role, rank, node
):
    """There is one target, so its text goes on only where Serve replaces the whole group."""
    before = nodes.group(role)
    assert len(before) == 2
    assert all(f"--node_ip_address={node}" in process.parent().cmdline() for process in before)

    async def kill(results):
        assert not any(result.done for result in results)
        before[rank].kill()

    results = await streamed(url, [body(prompt, TOKENS, temperature=0.8) for prompt in prompts(2)], kill)
    assert [result.text for result in results] == one_rank
    assert sum(result.accepted for result in results) > 0
    assert not await asyncio.to_thread(running, before, PATIENCE)


async def test_a_rank_killed_while_nothing_is_computed_ends_its_replica(nodes, url, one_rank):
    (text,) = await streamed(url, [body(prompts(1)[0], TOKENS, temperature=0.8)])
    assert text.text == one_rank[0]
    replica, rank = nodes.group("target")
    rank.kill()
    assert not await asyncio.to_thread(running, [replica], PATIENCE)


MODELS_SETTINGS = """\
target: {gpus: 1, device: cpu, gpu_class: large, dtype: fp32}
draft: {gpu_class: small, dtype: fp32}
models:
  org/one:
  two: {target: {model: %s}, drafts: {}}
ray: {placement_timeout: 120}
"""


async def test_starting_again_with_another_configuration_updates_what_runs(nodes, url, settings, one_rank, tmp_path):
    """The last test here: nothing is left of the model that served before."""
    file = tmp_path / "paceline.yaml"
    file.write_text(MODELS_SETTINGS % (MODELS / "draft"))
    again = await asyncio.to_thread(run, "up", *settings, "--config", str(file), "--detach", timeout=STARTS)
    assert again.returncode == 0, again.stderr
    assert "1 x target of org/one" in again.stdout
    assert "It is left running" in again.stdout
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, trust_env=False) as client:
        async with asyncio.timeout(PATIENCE):
            while [entry["id"] for entry in (await client.get("/v1/models")).json()["data"]] != ["org/one", "two"]:
                await asyncio.sleep(0.2)
        texts = []
        for name in ("org/one", "two"):
            request = body(prompts(1)[0], TOKENS, temperature=0.8, model=name)
            answer = await client.post("/v1/completions", json=request)
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["text"])
    assert texts[0] == one_rank[0] != texts[1]
    assert not nodes.group("target")[2:]
    for kind in ("TargetWorker-org-one", "DraftWorker-org-one.draft", "TargetWorker-two"):
        assert nodes.find(f"ray::ServeReplica:paceline:{kind}")
