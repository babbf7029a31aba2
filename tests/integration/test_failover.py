"""Real worker processes, killed and stopped in the middle of a stream: the text goes on, the same."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from router.dispatch import Dispatcher
from router.generation import Committed, Ended, Generation
from speculation.messages import Sampling, Speculation, Token
from tests.ports import free_port
from tests.stack import MODELS, dispatcher, held_out_prompts
from transport import client

DRAFT = MODELS / "draft"
SAMPLING = Sampling(temperature=0.8, seed=2024)
NEW_TOKENS = 160
STRIKE_AFTER = 40
READY_SECONDS = 600


@dataclass
class Process:
    """A worker process with an address of its own that survives it."""

    role: str
    model: Path
    address: str
    child: asyncio.subprocess.Process | None = None
    flags: Sequence[str] = ()

    async def start(self) -> None:
        flags = ["--model", str(self.model), "--dtype", "float32", "--listen", self.address, *self.flags]
        self.child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cluster.cli", "worker", self.role, *flags, stdout=asyncio.subprocess.PIPE
        )
        assert self.child.stdout is not None
        async with asyncio.timeout(READY_SECONDS):
            said = await self.child.stdout.readuntil(b"ready on ")
        assert b"loading on" in said, said

    def signal(self, number: int) -> None:
        assert self.child is not None
        self.child.send_signal(number)

    async def end(self) -> None:
        if self.child is not None and self.child.returncode is None:
            self.child.kill()
            self.child.send_signal(signal.SIGCONT)
        if self.child is not None:
            await self.child.wait()


@asynccontextmanager
async def workers(**models: list[Path]):
    """Worker processes, by role."""
    async with AsyncExitStack() as stack:
        started = []
        for role, model in [(role, model) for role, folders in models.items() for model in folders]:
            process = Process(role, model, f"127.0.0.1:{free_port()}")
            stack.push_async_callback(process.end)
            started.append(process)
        await asyncio.gather(*(process.start() for process in started))
        yield started


def busiest(serving: Dispatcher, processes: list[Process], role: str) -> Process:
    """The worker of this role that has a session."""
    with_session = {peer.peer for peer in serving.pool.peers.values() if peer.opened}
    return next(p for p in processes if p.role == role and f"{role}@{p.address}" in with_session)


async def stream(serving: Dispatcher, strike=None, speculate: bool = True) -> tuple[list[Token], int, int]:
    """Decode; call ``strike`` once in the middle. Returns the tokens, how many were drafted, and the failovers."""
    prompt = held_out_prompts()[0]
    tokens: list[Token] = []
    accepted = reopened = 0
    async for item in serving.generate(Generation(prompt, SAMPLING, NEW_TOKENS, speculation=Speculation(speculate))):
        if isinstance(item, Committed):
            tokens += item.tokens
            accepted += item.accepted
        elif isinstance(item, Ended):
            reopened = item.reopened
        if strike and len(tokens) >= STRIKE_AFTER:
            result, strike = strike(), None
            if asyncio.iscoroutine(result):
                await result
    return tokens, accepted, reopened


@pytest.mark.slow
async def test_killed_and_stopped_workers_do_not_change_the_text(slow_target, monkeypatch):
    monkeypatch.setattr(client, "WORKER_SILENCE_SECONDS", 6.0)  # a pause of a busy machine is no death
    async with workers(target=[slow_target] * 2, draft=[DRAFT] * 2) as processes:
        targets = [process.address for process in processes if process.role == "target"]
        drafts = [process.address for process in processes if process.role == "draft"]
        async with dispatcher(targets) as serving:
            plain, _, _ = await stream(serving)
        assert len(plain) == NEW_TOKENS
        async with dispatcher(targets, drafts) as serving:
            drafted, accepted, reopened = await stream(serving)
            assert (drafted, reopened) == (plain, 0)
            assert accepted > 0
            off, accepted, _ = await stream(serving, speculate=False)
            assert (off, accepted) == (plain, 0)

            killed, _, reopened = await stream(
                serving, lambda: busiest(serving, processes, "draft").signal(signal.SIGKILL)
            )
            assert (killed, reopened) == (plain, 0), "a drafter's death must not touch the target"

            struck, _, reopened = await stream(
                serving, lambda: busiest(serving, processes, "target").signal(signal.SIGSTOP)
            )
            assert struck == plain
            assert reopened == 1


@pytest.mark.thorough
@pytest.mark.slow
async def test_the_only_target_is_killed_and_replaced_in_mid_stream(slow_target):
    async with workers(target=[slow_target], draft=[DRAFT]) as (target, draft):
        async with dispatcher([target.address], [draft.address]) as serving:
            plain, _, _ = await stream(serving, speculate=False)

            async def replace() -> None:
                target.signal(signal.SIGKILL)
                await target.child.wait()
                await target.start()

            tokens, _, reopened = await stream(serving, replace)
            assert tokens == plain
            assert reopened >= 1


@pytest.mark.slow
async def test_a_worker_ends_on_sigterm_and_leaves_its_port():
    async with workers(draft=[DRAFT]) as (draft,):
        os.kill(draft.child.pid, signal.SIGTERM)
        async with asyncio.timeout(READY_SECONDS):
            assert await draft.child.wait() == 0
        await draft.start()
