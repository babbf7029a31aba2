"""Pools that follow a real load on a real Ray: up with the streams and down with them, while no text changes.

The limits are so low that a few streams of a tiny model are much work.
"""

import asyncio
import re
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.processes import PATIENCE, STARTS, Paceline
from tests.cluster.streams import body, plain, prompts, streamed
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
TOKENS = 300
SETTINGS = """\
target: {max_replicas: 2, max_running: 8, dtype: fp32, threads: 1}
draft: {max_replicas: 2, dtype: fp32, threads: 1}
autoscaling: {load: 0.25, delivery: 0.9, up_s: 1, down_s: 5, pause_s: 1, rest_s: 5, interval_s: 0.5, window_s: 2}
"""
RAMP = (1, 2, 3)
"""Streams that begin together, two seconds after those before them."""


@pytest.fixture(scope="module")
def paceline(slow_target, tmp_path_factory):
    file = tmp_path_factory.mktemp("autoscaling") / "paceline.yaml"
    file.write_text(SETTINGS)
    with Paceline("up", "--config", str(file), "--target", str(slow_target), "--port", str(free_port())) as up:
        up.expect("Ctrl-C stops it", STARTS)
        yield up
        assert up.stop(signal.SIGINT) == 0


def count(paceline, kind: str) -> int:
    return len(paceline.descendants(f"ray::ServeReplica:paceline:{kind}"))


def decisions(paceline) -> list[str]:
    """What Serve's controller has logged of them."""
    (raylet,) = {process.pid: process for process in paceline.descendants("/raylet/raylet ")}.values()
    folder = next(word.removeprefix("--log_dir=") for word in raylet.cmdline() if word.startswith("--log_dir="))
    text = "".join(file.read_text() for file in Path(folder, "serve").glob("controller_*.log"))
    assert "autoscaling policy failed" not in text, text
    assert "cannot post autoscaling decisions" not in text, text
    return re.findall(r"(\w+: \d+ -> \d+ replicas; \w+: .*)", text)


async def until(paceline, targets: int, drafts: int, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            while (count(paceline, "TargetWorker"), count(paceline, "DraftWorker")) != (targets, drafts):
                await asyncio.sleep(0.2)
    except TimeoutError:
        pytest.fail(f"not {targets} targets and {drafts} drafters within {seconds} s: {decisions(paceline)}")


async def test_pools_follow_the_load_up_and_down_and_no_text_changes(paceline):
    url = paceline.expect(r"Paceline serves at (\S+)")
    bodies = [body(prompt, TOKENS) for prompt in prompts(sum(RAMP))]
    expected = await plain(url, bodies[:2])
    max_seen = {"TargetWorker": 0, "DraftWorker": 0}

    async def watch() -> None:
        while True:
            for kind in max_seen:
                max_seen[kind] = max(max_seen[kind], count(paceline, kind))
            await asyncio.sleep(0.3)

    async def load() -> list[str]:
        """Requests without a pause until both pools have grown, then once more."""
        texts: list[str] = []
        deadline = time.monotonic() + PATIENCE
        grown = False
        while not grown and time.monotonic() < deadline:
            grown = max_seen["TargetWorker"] == 2 and max_seen["DraftWorker"] >= 1
            waves = []
            for number in RAMP:
                part = bodies[sum(map(len, waves)) :][:number]
                waves.append(part)
            groups = await asyncio.gather(*(delayed(2.0 * i, part) for i, part in enumerate(waves)))
            texts += [text for group in groups for text in group][:2]
        return texts

    async def delayed(seconds: float, part: list[dict]) -> list[str]:
        await asyncio.sleep(seconds)
        results = await streamed(url, part)
        assert all(result.done for result in results)
        return [result.text for result in results]

    watching = asyncio.create_task(watch())
    texts = await load()
    watching.cancel()
    assert max_seen["TargetWorker"] == 2 and max_seen["DraftWorker"] >= 1, (max_seen, decisions(paceline))
    assert texts == expected * (len(texts) // 2)
    await until(paceline, targets=1, drafts=0, seconds=PATIENCE)
    said = decisions(paceline)
    assert any(re.match(r"TargetWorker: 1 -> 2 replicas; (sessions|work|queue|cache): .*\d", line) for line in said), (
        said
    )
    assert any(line.startswith("DraftWorker: 0 -> 1 replicas; demand: ") for line in said), said
    assert any(line.startswith("TargetWorker: 2 -> 1 replicas; ") for line in said), said
    assert any(re.match(r"DraftWorker: \d -> 0 replicas; (idle|resting): ", line) for line in said), said
    assert len(said) <= 4 + 4 * (len(texts) // 2), f"that is flapping: {said}"
