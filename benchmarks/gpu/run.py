"""The engine on a GPU: what its steps take beside reading the weights, whether they are exact, and transformers.

Models of random weights are made on the device, by the way that a worker makes its own of a checkpoint. Stages are
apart: one that fails says why, and the others go on. On a CPU the same code runs on a tiny model, with the plain
computation in place of kernels and a repeated call in place of a graph, so that it can be tried anywhere.

Needs torch, transformers and triton; nothing of what serves requests, but for the stage on speculation, which is in
``benchmarks.gpu.speculation``.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from logging.handlers import BufferingHandler
from typing import Any, cast

import torch
from torch._C._autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from transformers.utils import logging as transformers_logging

from benchmarks.engine.steps import GREEDY, TimedSteps, Work, draw_tokens
from benchmarks.gpu import device as devices
from benchmarks.gpu import settings
from benchmarks.gpu.device import Subject, TimedDevice, floor_ms
from benchmarks.gpu.figures import StageResult, StepTiming, contender, result
from benchmarks.gpu.settings import GpuOptions
from benchmarks.harness.report import Result
from cluster.console import complain
from engine.attention.rows import ROW_CLASSES
from engine.cache.kv_cache import CachedSequence
from engine.interface import Chunk
from engine.levels.level_memory import LevelExpansion, TreePlace
from engine.levels.levels import Levels
from engine.loading.quantisation import weight_bytes
from engine.model import kind_and_line
from engine.sampling.sampling import Draw, candidates
from engine.settings import NONE
from engine.step import Engine
from speculation.messages import EXACT, Source
from speculation.verifying.calibration import Calibration

Report = Callable[[StageResult], None]
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
"""Of transformers, as torch chooses it: what we rule out for ourselves, others may use."""
KERNELS, MOST_WARNINGS = 12, 10_000


def main(options: GpuOptions) -> int:
    """Measure and report; 1 if a stage failed. Figures are written after each."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU, with stand-ins for what a GPU does"
    outcomes, warnings = list[StageResult](), BufferingHandler(MOST_WARNINGS)
    warnings.setLevel(logging.WARNING)

    def so_far() -> Result:
        return result(options, name, outcomes, [record.getMessage() for record in warnings.buffer])

    def report(outcome: StageResult) -> None:
        outcomes.append(outcome)
        what = " ".join(filter(None, (outcome.stage, outcome.shape, outcome.part)))
        complain(f"{what}: {outcome.failed or 'done'}, {outcome.seconds:.1f} s")
        so_far().save()

    logging.getLogger("engine").addHandler(warnings)
    try:
        measure(options, device, report, complain)
    finally:
        logging.getLogger("engine").removeHandler(warnings)
    so_far().show()
    return int(any(outcome.failed for outcome in outcomes))


def measure(options: GpuOptions, device: torch.device, report: Report, tell: Callable[[str], None]) -> None:
    """Every stage with every shape it is asked for, shape by shape: one model at a time."""
    gpu = TimedDevice(device, options.sizes, options.quantization)
    for shape, stages in options.plan().items():
        subject: Subject | None = None
        unbuilt = ""
        for stage in stages:
            started = time.perf_counter()
            try:
                if stage == settings.SPECULATION:
                    # Only here: it needs what serves requests.
                    import_module("benchmarks.gpu.speculation").measure(options, gpu, report, tell)
                    continue
                if shape and subject is None and not unbuilt:
                    subject = devices.build(shape, gpu)
                if subject is None:
                    outcome = StageResult(failed=unbuilt) if shape else _floor(gpu)
                else:
                    outcome = MEASURED[stage](subject)
            except Exception as error:
                outcome = StageResult(failed=kind_and_line(error))
                unbuilt = f"its model was not built: {outcome.failed}"
            report(replace(outcome, stage=stage, shape=shape, seconds=time.perf_counter() - started))
        del subject
        gpu.tidy()


def _floor(gpu: TimedDevice) -> StageResult:
    floors = {f"floor of {name}, ms": floor_ms(shape, gpu) for name, shape in settings.SHAPES.items()}
    return StageResult(facts={"GB/s": gpu.bandwidth / 1e9} | floors)


def _cases(subject: Subject) -> tuple[TimedSteps, Callable[[str], Work]]:
    """Sequences with their contexts computed, and the steps of :data:`~benchmarks.gpu.settings.CASES` over them."""
    most, sizes = max(count for count, _, _ in settings.CASES.values()), subject.gpu.sizes
    steps = TimedSteps(subject.engine, [subject.text(sizes.context) for _ in range(most)] + [subject.text(sizes.far)])

    def work(name: str) -> Work:
        count, parents, far = settings.CASES[name]
        return steps.step([most] if far else range(count), parents)

    return steps, work


def _steps(subject: Subject) -> StageResult:
    sizes, engine = subject.gpu.sizes, subject.engine
    floor, module = floor_ms(subject.shape, subject.gpu), cast(Any, engine.model.module)
    facts = {}
    if subject.gpu.quantization != NONE:
        embedding = 0 if subject.shape.tied else module.get_input_embeddings().weight.nbytes
        floor = 1e3 * (weight_bytes(module) - embedding) / subject.gpu.bandwidth
        facts = {"weights": engine.model.weights}
    steps, work = _cases(subject)
    for again in map(work, settings.CASES):
        for _ in range(sizes.warm_up):
            again()  # the host takes a moment to get to its pace, not only a step's own memory
    found = {
        name: _timed(subject, work(name), count * len(parents), sizes.rounds, floor)
        for name, (count, parents, _) in settings.CASES.items()
    }
    steps.free()
    return StageResult(steps=found, facts=facts)


def _draft(subject: Subject) -> StageResult:
    """Steps of a draft model, and several levels of drafts: each a step that the host prepares, or all one launch."""
    outcome, engine, sizes = _steps(subject), subject.engine, subject.gpu.sizes
    levels = engine.levels(settings.DRAFT_WIDTH, settings.DRAFT_CHILDREN)
    found = dict(outcome.steps)
    for count in settings.DRAFTING_SESSIONS:
        texts = [subject.text(sizes.context) for _ in range(count)]
        cached = TimedSteps(engine, [text[:-1] for text in texts])
        given = engine, cached.sequences, texts
        tokens = count * (1 + (settings.DRAFT_LEVELS - 1) * settings.DRAFT_WIDTH)
        works: dict[str, Work] = {settings.one_by_one(count): partial(one_by_one, *given)}
        if levels is not None:
            works[settings.launched(count)] = partial(launch, *given, levels)
        found |= {name: replace(_timed(subject, work, tokens, sizes.rounds), rows=0) for name, work in works.items()}
        cached.free()
    return replace(outcome, steps=found, failed=outcome.failed or ("" if levels else "levels are not launched"))


def one_by_one(engine: Engine, sequences: Sequence[CachedSequence], texts: Sequence[Sequence[int]]) -> None:
    """Draft greedily behind texts of which all but the last token is cached: a step for each level; nothing is kept."""
    expanded: list[list[tuple[int, int]]] = [[(text[-1], -1)] for text in texts]  # token and parent
    for _ in range(settings.DRAFT_LEVELS):
        chunks, draws = [], []
        for sequence, places in zip(sequences, expanded, strict=True):
            tokens, parents = zip(*places, strict=True)
            chunks.append(Chunk(sequence, tokens, parents, range(len(places))))
            draws += [Draw(GREEDY, sequence.length + row) for row in range(len(places))]
        found = iter(candidates(engine.run(chunks), draws, settings.DRAFT_CHILDREN))
        for sequence, places in zip(sequences, expanded, strict=True):
            first = sequence.pending - len(places)
            drafts = [(each.token, first + row) for row in range(len(places)) for each in next(found)]
            places[:] = drafts[: settings.DRAFT_WIDTH]
    for sequence in sequences:
        sequence.rollback()


def launch(engine: Engine, sequences: Sequence[CachedSequence], texts: Sequence[Sequence[int]], levels: Levels) -> None:
    """The same, with the first level as a step and the others behind it in one launch."""
    logits_RV = engine.run([Chunk(each, text[-1:], rows=[0]) for each, text in zip(sequences, texts, strict=True)])
    odds = Calibration()
    growths = [
        LevelExpansion(
            sampling=GREEDY,
            stops=(),
            position=len(text),
            max_end=len(text) + settings.DRAFT_LEVELS,
            min_weight=0.0,
            width=settings.DRAFT_WIDTH,
            children=settings.DRAFT_CHILDREN,
            factors=odds.factors(Source.DRAFT),
            blocks=sequence.blocks,
            rows=[number],
            places=[TreePlace(len(text), *sequence.lineage(0))],
            weights=[1.0],
            leaves=(),
            slots=sequence.append([0] * ((settings.DRAFT_LEVELS - 1) * levels.width)),
        )
        for number, (sequence, text) in enumerate(zip(sequences, texts, strict=True))
    ]
    levels.read(levels.launch(logits_RV, growths, odds.table(Source.DRAFT), settings.DRAFT_LEVELS))
    for sequence in sequences:
        sequence.rollback()


def _timed(subject: Subject, work: Work, tokens: int, rounds: int, floor: float | None = None) -> StepTiming:
    wall, graph, layout = subject.clock.time(work, rounds)
    rows = next((rows for rows in subject.engine.row_classes if rows >= tokens), 0)
    return StepTiming(tokens, rows, wall, graph, layout, floor)


def _exact(subject: Subject) -> StageResult:
    """What the engine measured when it was built."""
    engine = subject.engine
    possible = [rows for rows in ROW_CLASSES if rows <= engine.model.spare]
    given_up = [rows for rows in possible if rows not in engine.row_classes]
    told = engine.exactness or "not measured"
    return StageResult(
        facts={"exact": told == EXACT, "told": told, "given up": given_up, "rows": list(engine.row_classes)}
    )


def _kernels(subject: Subject) -> StageResult:
    """The kernels of some steps that take longest, by name: milliseconds a step, and how often they are launched."""
    on_cuda, rounds = subject.gpu.on_cuda, subject.gpu.sizes.turns
    steps, work = _cases(subject)
    facts: dict[str, Any] = {}
    for name in settings.PROFILED:
        again = work(name)
        again()
        with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as traced:
            for _ in range(rounds):
                again()
            subject.gpu.wait()
        found: defaultdict[str, list[float]] = defaultdict(list)
        for event in traced.events() or ():
            if not on_cuda or event.device_type == DeviceType.CUDA:
                found[event.name[:60]].append(event.device_time_total if on_cuda else event.self_cpu_time_total)
        longest = sorted(found.items(), key=lambda item: -sum(item[1]))[:KERNELS]
        facts |= {
            f"{name}: {kernel}": f"{sum(times) / 1e3 / rounds:.3f} ms in {len(times) / rounds:g}"
            for kernel, times in longest
        }
    steps.free()
    return StageResult(facts=facts)


def _prompt(subject: Subject) -> StageResult:
    text = subject.text(subject.gpu.sizes.prompt)

    def work() -> None:
        sequence = subject.engine.cache.sequence()
        draw_tokens(subject.engine, [Chunk(sequence, text, rows=[len(text) - 1], draws=[Draw(GREEDY, len(text))])])
        sequence.rollback()
        sequence.free()

    return StageResult(steps={settings.PROMPT: _timed(subject, work, len(text), max(1, subject.gpu.sizes.rounds // 3))})


def _transformers(subject: Subject) -> StageResult:
    """Ours and transformers' continue the same prompts in turn, each of them another one in every turn."""
    gpu, sizes = subject.gpu, subject.gpu.sizes
    module = devices.random_module(subject.shape, gpu)
    module.set_attn_implementation("sdpa")

    def generate(prompts: list[list[int]], **how: Any) -> None:
        ids_BT = torch.tensor(prompts, device=gpu.device)
        with sdpa_kernel(ATTENTION):
            module.generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                max_new_tokens=sizes.request,
                do_sample=False,
                pad_token_id=0,
                **how,
            )

    contenders: dict[str, Callable[[list[list[int]]], object]] = {
        settings.OURS: lambda prompts: decode(subject.engine, prompts, sizes.request),
        settings.GENERATE: generate,
        settings.COMPILED: partial(generate, cache_implementation="static"),  # which it compiles on a GPU
    }
    rates: dict[str, list[float]] = {}
    failed = []
    for batch in sizes.batches:
        if gpu.on_cuda:
            torch.compiler.reset()  # or it would compile for any batch, which is slower
        left = dict(contenders)
        for turn in range(-1, sizes.turns):
            prompts = [subject.text(sizes.request) for _ in range(batch)]
            for name in sorted(left, reverse=bool(turn % 2)):
                try:
                    gpu.wait()
                    started = time.perf_counter()
                    left[name](prompts)
                    gpu.wait()
                except Exception as error:
                    failed.append(f"{contender(name, batch)}: {kind_and_line(error)}")
                    del left[name]
                    continue
                if turn >= 0:
                    rate = batch * sizes.request / (time.perf_counter() - started)
                    rates.setdefault(contender(name, batch), []).append(rate)
    return StageResult(rates=rates, failed="; ".join(failed))


def decode(engine: Engine, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """Continue all prompts together, greedily, by ``new`` tokens each."""
    sequences = [engine.cache.sequence() for _ in prompts]
    texts: list[list[int]] = [[] for _ in prompts]
    fed: Sequence[Sequence[int]] = prompts
    try:
        for _ in range(new):
            chunks = [
                Chunk(sequence, part, rows=[len(part) - 1], draws=[Draw(GREEDY, sequence.length + len(part))])
                for sequence, part in zip(sequences, fed, strict=True)
            ]
            tokens = draw_tokens(engine, chunks)
            for sequence, part, text, token in zip(sequences, fed, texts, tokens, strict=True):
                sequence.advance(range(len(part)))
                text.append(token)
            fed = [[token] for token in tokens]
    finally:
        for sequence in sequences:
            sequence.rollback()
            sequence.free()
    return texts


MEASURED: dict[str, Callable[[Subject], StageResult]] = {
    "steps": _steps,
    "draft": _draft,
    "exact": _exact,
    "prompt": _prompt,
    "kernels": _kernels,
    "transformers": _transformers,
}
