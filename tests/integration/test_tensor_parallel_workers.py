"""Worker processes with ranks: killed, stopped and refused, and the router's sessions go on with the same text."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys

import psutil
import pytest

from router.dispatch import Dispatcher
from router.generation import Committed, Ended, Generation
from speculation.events import Role
from speculation.messages import Sampling, Speculation, Token
from tests.cluster.processes import CHECKOUT, PATIENCE, Paceline, run
from tests.ranks import needs_no_gpu
from tests.stack import dispatcher, held_out_prompts
from transport import client

pytestmark = needs_no_gpu

NEW_TOKENS = 300
STRIKE_AFTER = 30
RANKS = ("--tensor-parallel-size", "2")
RANKS_WITHOUT_TASKS = """
import sys
from types import SimpleNamespace
from cluster import cli
from cluster.processes import rank_processes
rank_processes.pickle = SimpleNamespace(dumps=lambda task: b"")
sys.exit(cli.main())
"""
"""The command line, but its ranks are started and never told what to do."""


def worker(role: str, *flags: str) -> Paceline:
    return Paceline("worker", role, "--dtype", "fp32", "--device", "cpu", "--listen", "127.0.0.1:0", *flags)


def address(process: Paceline) -> str:
    return process.expect(r"worker ready on (\S+) ")


def rank_of(process: Paceline) -> psutil.Process:
    (rank,) = process.descendants("cluster.processes.rank_processes")
    return rank


async def stream(serving: Dispatcher, strike=None) -> tuple[list[Token], int, int]:
    """Decode; call ``strike`` once in the middle. Returns the tokens, how many were drafted, and the failovers."""
    sampling = Sampling(temperature=0.8, seed=7)
    tokens: list[Token] = []
    accepted = reopened = 0
    async for item in serving.generate(
        Generation(held_out_prompts()[0], sampling, NEW_TOKENS, speculation=Speculation())
    ):
        if isinstance(item, Committed):
            tokens += item.tokens
            accepted += item.accepted
        elif isinstance(item, Ended):
            reopened = item.reopened
        if strike and len(tokens) >= STRIKE_AFTER:
            strike()
            strike = None
    return tokens, accepted, reopened


@pytest.mark.thorough
@pytest.mark.slow
async def test_a_group_that_loses_a_rank_ends_and_its_sessions_move(monkeypatch):
    monkeypatch.setattr(client, "WORKER_SILENCE_SECONDS", 6.0)  # a pause of a busy machine is no death
    with worker("target", *RANKS) as group, worker("target") as alone, worker("draft", *RANKS) as drafter:
        on_ranks, other, drafts = address(group), address(alone), address(drafter)
        async with dispatcher([other]) as serving:
            plain, _, _ = await stream(serving)
        assert len(plain) == NEW_TOKENS

        async with dispatcher([on_ranks], [drafts]) as serving:
            tokens, accepted, reopened = await stream(serving)
            assert (tokens, reopened) == (plain, 0)
            assert accepted > 0

            def lose_a_rank() -> None:
                serving.pool.set_workers(Role.TARGET, [on_ranks, other])
                rank_of(group).kill()

            tokens, _, reopened = await stream(serving, lose_a_rank)
            assert (tokens, reopened) == (plain, 1)
            assert await asyncio.to_thread(group.ended) == 1
            assert "rank 1 of 2: was killed by signal 9" in group.lines[-1]

            rank = rank_of(drafter)

            def lose_the_worker() -> None:
                rank.suspend()  # so that only the kernel can end it
                drafter.process.kill()

            tokens, _, reopened = await stream(serving, lose_the_worker)
            assert (tokens, reopened) == (plain, 0)
            rank.wait(PATIENCE)


@pytest.mark.slow
def test_a_group_ends_on_sigterm():
    with worker("draft", *RANKS) as drafter:
        address(drafter)
        rank = rank_of(drafter)
        assert drafter.stop(signal.SIGTERM) == 0
        rank.wait(PATIENCE)
        assert "draft worker ready on" in drafter.lines[-1], drafter.output


def test_a_size_that_does_not_divide_the_model_is_refused():
    refused = run("worker", "draft", "--tensor-parallel-size", "3", "--device", "cpu", "--listen", "127.0.0.1:0")
    assert refused.returncode == 2
    line = r"paceline: \S+: tensor_parallel_size 3 does not divide its 2 key/value heads; possible: 1, 2"
    assert re.fullmatch(line, refused.stderr.splitlines()[-1])


def test_a_rank_that_does_not_join_in_time_is_named():
    flags = ["--device", "cpu", "--listen", "127.0.0.1:0", "--join-timeout", "0.1", *RANKS]
    command = [sys.executable, "-c", RANKS_WITHOUT_TASKS, "worker", "draft", *flags]
    failed = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=PATIENCE)
    assert failed.returncode == 1
    line = r"paceline: not all 2 ranks joined within 0.1 s \(join_timeout\): rank 1 runs, and .*"
    assert re.fullmatch(line, failed.stderr.splitlines()[-1])
