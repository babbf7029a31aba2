"""Drafting beside plain decoding on a GPU: tokens a second of a stretched target, wherever its draft model works.

The target is the bundled one at the cost of a model of billions of parameters (:mod:`models.growth`), made on the
device, with noise so that the bundled one, which drafts for it, agrees as often as was asked for. Every placement of
the draft model has a target worker of its own, so that none learns costs and odds from another's drafts; all are
started together, and idle but for the one whose turn it is. The router's session code runs in this process. Decided
here: which workers there are, and who takes turns with whom. Drafts come from the draft model alone, and nothing is
remembered.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import torch

from benchmarks.gpu import settings
from benchmarks.gpu.device import TimedDevice
from benchmarks.gpu.figures import Speedup, StageResult
from benchmarks.gpu.settings import DraftingSetting, GpuOptions
from benchmarks.harness.measure import DRAFTED, PLAIN, Run, Runner, beside, seeded, served, take_turns
from benchmarks.harness.pair import Pair, Shape, held_out, stretched_pair, wrong_draft
from benchmarks.harness.processes import ReadyProcess, WorkerPlan, all_running, connected, losses_unsaid, until_lost
from router.dispatch import Dispatcher
from speculation.events import Role
from speculation.messages import Token

FIRST_WARM_UP, WARM_UP = 6, 1
"""Rounds before those that count, with drafts of another kind or another number of texts, and in other settings: what a
step takes, and what drafts are worth, is learned in service, for each size of a batch."""
MAX_PROMPT_TOKENS = 64
BRANCHES = 128
"""Room in the cache for the drafts of a text."""
MIN_CACHE_TOKENS = 4096
CPU_THREADS = 4


def measure(
    options: GpuOptions, gpu: TimedDevice, report: Callable[[StageResult], None], tell: Callable[[str], None]
) -> None:
    """Build the pair, start the workers, and measure setting by setting.

    Reports an outcome for what was built and one for each setting. Raises
    :class:`benchmarks.harness.processes.WorkerFailed`, TimeoutError, and what the device does.
    """
    started = time.perf_counter()
    sizes = options.sizes
    tell(f"building the target: hidden size {sizes.hidden}, {sizes.layers} layers (or finding it as built before)")
    pair = stretched_pair(Shape(sizes.hidden, sizes.layers, options.agreement), gpu.device)
    gpu.tidy()  # the workers need its memory
    facts = {"parameters": pair.parameters, "agreement": pair.agreement}
    built = StageResult(settings.SPECULATION, _shape(gpu), "pair", time.perf_counter() - started, facts=facts)
    report(built)
    bench = DraftingBench(options, gpu, pair, report, tell)
    with losses_unsaid("transport.client"):
        asyncio.run(bench.run(options.budget_s - built.seconds if options.budget_s else None))


@dataclass(slots=True)
class DraftingBench:
    """The settings, on workers of one pair."""

    options: GpuOptions
    gpu: TimedDevice
    pair: Pair
    report: Callable[[StageResult], None]
    tell: Callable[[str], None]

    async def run(self, seconds: float | None) -> None:
        """Measure all settings, or as many as there is time for."""
        left = list(self.options.settings)
        try:
            async with asyncio.timeout(seconds) as budget, AsyncExitStack() as ending:
                workers = await self._start(ending)
                for drafter in dict.fromkeys(setting.drafter for setting in left):
                    runners = await self._contenders(ending, workers, drafter)
                    streams = 0
                    while left and left[0].drafter == drafter:
                        warm_up = WARM_UP if left[0].streams == streams else FIRST_WARM_UP
                        self.report(await self._compare(left[0], runners, warm_up))
                        streams = left.pop(0).streams
        except TimeoutError:
            if not budget.expired():
                raise
        if left:
            facts = {"not measured for want of time": f"{len(left)} settings, from {left[0]} on"}
            self.report(StageResult(settings.SPECULATION, _shape(self.gpu), "rest", facts=facts))

    async def _start(self, ending: AsyncExitStack) -> dict[str, ReadyProcess]:
        """All at once: reading weights and recording steps takes each of them a while."""
        started = time.perf_counter()
        drafters = sorted({_alive(setting.drafter) for setting in self.options.settings})
        plans: dict[str, WorkerPlan] = {}
        for placement, drafter in itertools.product(self.options.placed, drafters):
            plans |= self._plans(placement, drafter)
        self.tell(f"starting {len(plans)} workers")
        workers = await ending.enter_async_context(all_running([*plans.values()], together=True))
        self.tell(f"ready after {time.perf_counter() - started:.0f} s: {', '.join(plans)}")
        return dict(zip(plans, workers, strict=True))

    def _plans(self, placement: str, drafter: str) -> dict[str, WorkerPlan]:
        """By name: a target, and where the draft model works elsewhere, that: then it serves with all drafters.

        ``drafter``: one that is alive.
        """
        draft = wrong_draft(self.pair) if drafter == settings.WRONG else self.pair.draft
        device, options = self.gpu.device.type, self.options
        room = max(max(options.sizes.streams) * (MAX_PROMPT_TOKENS + options.tokens + BRANCHES), MIN_CACHE_TOKENS)
        flags = ["--device", device, "--dtype", "auto", "--cache-tokens", str(room)]
        if placement == settings.SHARED:
            flags += ["--set", f"draft.device={device}", "--draft-model", str(draft)]
            plans = {f"{placement} {drafter} target": WorkerPlan(Role.TARGET, self.pair.target, None, flags=flags)}
        else:
            plans = {
                f"{placement} target": WorkerPlan(Role.TARGET, self.pair.target, None, flags=flags),
                f"{placement} {drafter} draft": WorkerPlan(Role.DRAFT, draft, None, flags=self._drafting(placement)),
            }
        if not options.records:
            return plans
        folder = Path(options.records)
        return {name: replace(plan, record=folder / f"{name.replace(' ', '-')}.jsonl") for name, plan in plans.items()}

    def _drafting(self, placement: str) -> list[str]:
        if placement == settings.CPU or not self.gpu.on_cuda:
            threads = CPU_THREADS if self.gpu.on_cuda else 1
            return ["--device", "cpu", "--threads", str(threads)]
        return ["--device", "cuda:1" if torch.cuda.device_count() > 1 else "cuda"]

    async def _contenders(
        self, ending: AsyncExitStack, workers: Mapping[str, ReadyProcess], drafter: str
    ) -> dict[str, Runner]:
        """Plain decoding, and drafting from every place; plain on a target without a draft model, if there is one."""
        routers: dict[str, Dispatcher] = {}
        for placement in self.options.placed:
            if (placement, drafter) == (settings.SHARED, settings.DEAD):
                continue  # it would take the target with it
            both = [workers[name] for name in self._plans(placement, _alive(drafter))]
            routers[placement] = await ending.enter_async_context(connected(*both))
            if drafter == settings.DEAD:
                await both[1].kill()
                await until_lost(routers[placement], Role.DRAFT)
        alone = next((placement for placement in routers if placement != settings.SHARED), settings.SHARED)
        drafting = {placement: served(router, DRAFTED) for placement, router in routers.items()}
        return {"plain": served(routers[alone], PLAIN), **drafting}

    async def _compare(self, setting: DraftingSetting, runners: Mapping[str, Runner], warm_up: int) -> StageResult:
        started, options = time.perf_counter(), self.options
        prompts = [prompt[:MAX_PROMPT_TOKENS] for prompt in held_out()]
        batches = seeded(distinct(prompts), options.rounds, setting.streams, options.tokens, setting.temperature)
        runs = await take_turns(runners, batches, warm_up)
        plain = runs.pop("plain")
        alone = self.gpu.on_cuda and torch.cuda.device_count() == 1
        names = {settings.OWN: settings.SAME_GPU} if alone else {}
        speedups = [speedup_of(names.get(where, where), setting, plain, drafted) for where, drafted in runs.items()]
        seconds = time.perf_counter() - started
        return StageResult(settings.SPECULATION, _shape(self.gpu), str(setting), seconds, speedups=speedups)


def _alive(drafter: str) -> str:
    """Whose worker that is: one dies that was right."""
    return settings.RIGHT if drafter == settings.DEAD else drafter


def distinct(prompts: Sequence[tuple[Token, ...]]) -> Iterator[tuple[Token, ...]]:
    """As many as are wanted, and no two begin alike: those that are used again lack some of their beginning."""
    return (prompt[cut:] for cut in itertools.count() for prompt in prompts)


def speedup_of(placement: str, setting: DraftingSetting, plain: Sequence[Run], drafted: Sequence[Run]) -> Speedup:
    """Of the runs of the same batches."""
    found = beside(drafted, plain)
    return Speedup(
        placement=placement,
        setting=setting,
        plain=tuple(run.rate for run in plain),
        drafted=found.rates,
        ratios=found.ratios,
        offered=fmean(commit.offered for commit in found.commits),
        kept=fmean(commit.accepted for commit in found.commits),
        same_text=found.same_text,
        plain_ms=_between_commits(plain),
        drafted_ms=_between_commits(drafted),
    )


def _between_commits(runs: Sequence[Run]) -> float:
    """Milliseconds, median over all texts."""
    commits = [[commit.at for commit in request.commits] for run in runs for request in run.decoded]
    return 1e3 * median(later - earlier for times in commits for earlier, later in itertools.pairwise(times))


def _shape(gpu: TimedDevice) -> str:
    """Goals are those of a GPU."""
    return settings.STRETCHED if gpu.on_cuda else settings.CPU_SHAPE
