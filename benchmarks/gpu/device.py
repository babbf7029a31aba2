"""The device, how time is taken on it, and the models of random weights that are made there."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.engine.settings import LlamaShape
from benchmarks.engine.steps import Work
from benchmarks.gpu.settings import SHAPES, Sizes
from engine.attention.row_attention import RowAttention
from engine.build import build_alone
from engine.cuda.graphs import CudaRecorder, Record
from engine.loading.loader import Treatment, from_module
from engine.settings import NONE, EngineSettings
from engine.step import Engine

SEED = 0
READS = 8


class TimedDevice:
    """The device, and how time is taken on it."""

    def __init__(self, device: torch.device, sizes: Sizes, quantization: str = NONE) -> None:
        self.device, self.sizes, self.quantization = device, sizes, quantization
        self.on_cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_cuda else torch.float32

    def mark(self) -> Any:
        """A moment in what the device does."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def milliseconds(self, begin: Any, end: Any) -> float:
        """Between two marks that the device has passed."""
        return float(begin.elapsed_time(end)) if self.on_cuda else 1e3 * (end - begin)

    def wait(self) -> None:
        """Until it has done all that it was asked."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def tidy(self) -> None:
        """Give back what nobody holds any more."""
        gc.collect()
        if self.on_cuda:
            with suppress(RuntimeError):  # of a device that has failed
                torch.compiler.reset()
                torch.cuda.empty_cache()

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second, of adding up a buffer that no cache holds; measured once."""
        numbers = torch.ones(self.sizes.read_bytes // 4, device=self.device)
        milliseconds = []
        for _ in range(READS):
            begin = self.mark()
            numbers.sum()
            end = self.mark()
            self.wait()
            milliseconds.append(self.milliseconds(begin, end))
        return 1e3 * numbers.nbytes / median(milliseconds)


class ReplayTimer:
    """Records steps as another does, and takes the time of what is replayed."""

    def __init__(self, record: Record, gpu: TimedDevice) -> None:
        self._record, self._gpu = record, gpu
        self._replays: list[tuple[float, Any, Any]] | None = None

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See :data:`engine.cuda.graphs.Record`."""
        replay = self._record(compute)

        def timed() -> Tensor:
            if self._replays is None:
                return replay()
            asked, begin = time.perf_counter(), self._gpu.mark()
            found_RX = replay()
            self._replays.append((asked, begin, self._gpu.mark()))
            return found_RX

        return timed

    def time(self, work: Work, rounds: int) -> tuple[float, float | None, float | None]:
        """Milliseconds of a work that ends when its result is on the host: wall, replayed, and before the first replay.

        Medians over the rounds; None where nothing was replayed.
        """
        walls, graphs, layouts = [], [], []
        for number in range(self._gpu.sizes.warm_up + rounds):
            self._gpu.wait()
            self._replays = []
            started = time.perf_counter()
            work()
            wall = time.perf_counter() - started
            self._gpu.wait()
            replays, self._replays = self._replays, None
            if number < self._gpu.sizes.warm_up:
                continue
            walls.append(1e3 * wall)
            if replays:
                graphs.append(sum(self._gpu.milliseconds(begin, end) for _, begin, end in replays))
                layouts.append(1e3 * (replays[0][0] - started))
        return median(walls), median(graphs) if graphs else None, median(layouts) if layouts else None


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is measured."""

    shape: LlamaShape
    gpu: TimedDevice
    engine: Engine
    clock: ReplayTimer

    def text(self, tokens: int) -> list[int]:
        """Another one whenever it is asked for."""
        return list(torch.randint(self.shape.vocabulary, (tokens,)).tolist())


class StandIn(RowAttention):
    """Without a GPU: steps are padded all the same."""

    replayed, spare = True, 64


def build(name: str, gpu: TimedDevice) -> Subject:
    """A model of random weights on the device, its steps recorded. Raises ModelError, and what the device does."""
    shape = SHAPES[name]
    module = random_module(shape, gpu)
    # What quantising does to random weights says nothing of a model's.
    how = Treatment(gpu.quantization, pack=False, self_test=gpu.quantization == NONE)
    model = from_module(name, module, {}, gpu.dtype, gpu.device, how)
    record: Record = lambda compute: compute  # noqa: E731
    if gpu.on_cuda:
        record = CudaRecorder(gpu.device)
    else:
        model = replace(model, attention=StandIn(page=16))
    clock = ReplayTimer(record, gpu)
    settings = EngineSettings(name, cache_tokens=gpu.sizes.cache_tokens)
    return Subject(shape, gpu, build_alone(settings, model, record=clock), clock)


def random_module(shape: LlamaShape, gpu: TimedDevice) -> Any:
    """The same weights for the same shape, made where they stay."""
    torch.manual_seed(SEED)
    with torch.device(gpu.device):
        module: Any = AutoModelForCausalLM.from_config(shape.config, dtype=gpu.dtype)  # type: ignore[no-untyped-call]
    return module.eval().requires_grad_(False)


def floor_ms(shape: LlamaShape, gpu: TimedDevice) -> float:
    """Reading the weights that a step reads once."""
    return 1e3 * shape.weights_read * gpu.dtype.itemsize / gpu.bandwidth
