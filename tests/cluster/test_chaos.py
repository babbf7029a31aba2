"""Faults in a real cluster of pretend nodes under streaming requests: no request fails, and no text differs.

The short form of ``make chaos``: the same cluster and the same code, fewer faults, and no time is compared with a
bound, except that streams must go on before what hangs does.
"""

import pytest
import pytest_asyncio

from benchmarks.chaos import faults, scenarios
from benchmarks.chaos.settings import ChaosOptions, configuration
from benchmarks.chaos.stage import Stage, running
from tests.cluster.processes import PATIENCE
from tests.ports import free_port
from tests.ranks import needs_no_gpu

pytestmark = [pytest.mark.slow, pytest.mark.thorough, needs_no_gpu, pytest.mark.asyncio(loop_scope="module")]
OPTIONS = ChaosOptions(streams=8, tokens=150, hang=20.0)
SCENARIOS = {scenario.name: scenario for scenario in scenarios.scenarios(OPTIONS)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "STUCK_SECONDS", PATIENCE)
        patch.setattr(Stage.whole, "__defaults__", (PATIENCE,))
        async with running(configuration(free_port(), OPTIONS.dtype)) as stage:
            yield stage


# A killed rank is the business of test_serve_ranks.
@pytest.mark.parametrize(
    "name", ["stop-target", "stop-rank", "kill-controller", "remove-small", "starve-draft", "one-way"]
)
async def test_a_fault_is_not_seen_by_clients(stage, name):
    outcome = await scenarios.run(SCENARIOS[name], stage, OPTIONS)
    counted = outcome.tally
    assert (counted.failed, counted.different, counted.refused) == (0, 0, 0), counted.complaints
    assert counted.requests >= OPTIONS.streams
    assert not outcome.complaints
    assert counted.silence.seconds < (PATIENCE if name == "stop-rank" else OPTIONS.hang)
