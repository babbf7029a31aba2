"""What a worker does about its imports: PyTorch and transformers, which are most of its start.

They leave objects that live as long as it does. Looking for garbage among them while they come takes a tenth of the
time; looking through them later would stop everything for 0.4 s, once in a while.

transformers imports whatever is installed and some model might need: distributed tensors, the compiler, two libraries
for quantised and for scattered weights. That is a third of the time. A worker whose model is read whole, as it is,
needs none of it, and says so; whether that holds is decided here, by settings and the model's folder. And it reads the
source of all its models twice, to list what they define, for 0.6 s each time.

And which GPU they find is decided before they come.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from cluster.config.config import Config
from cluster.config.environment import VISIBLE_GPUS, expanded, on_cpu, visible_gpu
from cluster.config.pools import SHARED, DraftConfig, TargetConfig
from cluster.config.settings import CheckError
from speculation.events import Role

UNUSED = ("accelerate", "torchao")
"""Packages that transformers finds not installed in a process that does without."""
STORED_OTHERWISE = (b'"quantization_config"', b'"compression_config"')
"""What the config.json of a model says whose weights are not read as they are."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect nothing while the block imports modules, and never look at what is there in the end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def import_worker(config: Config, role: Role) -> None:
    """Import what a worker with this configuration computes with, and nothing that it has no use for."""
    import_engine(f"{role}_service.service", plain=reads_plain_weights(config, role))


def import_engine(*modules: str, plain: bool) -> None:
    """Import modules that compute models; ``plain``: without what no model needs whose weights are read as they are."""
    with uncollected():
        if plain:
            do_without()
        list_models_once()
        for module in modules:
            importlib.import_module(module)


def on_own_gpu(config: Config, role: Role) -> Config:
    """The same, in a process that from now on sees no GPU but the one that its device names, as ``cuda:1``.

    Kernels are launched on a thread's current GPU, which is the first that the process sees. Comes before PyTorch.
    Raises :class:`cluster.config.settings.CheckError`.
    """
    workers = _in_process(config, role)
    named = {name: worker for name, worker in workers.items() if re.fullmatch(r"cuda:\d+", worker.device)}
    numbers = {worker.device for worker in named.values()}
    if not numbers or workers[role.value].tensor_parallel_size > 1:  # ranks take one each of those that are seen
        return config
    if len(numbers) > 1:
        both = f"target.device is {config.target.device}, draft.device is {config.draft.device}"
        raise CheckError(f"{both}, but a draft model in its target's process computes on the same GPU; leave one out")
    gpu = visible_gpu(int(numbers.pop().removeprefix("cuda:")))
    if not gpu:
        return config  # torch says that there is no such GPU
    os.environ[VISIBLE_GPUS] = gpu
    there: dict[str, Any] = {name: replace(worker, device="cuda") for name, worker in named.items()}
    return replace(config, **there)


def _in_process(config: Config, role: Role) -> dict[str, TargetConfig | DraftConfig]:
    """What a process computes for, by section: a draft, or a target, with the draft model that takes turns with it."""
    sections = {role.value, "draft"} if config.draft.placement == SHARED else {role.value}
    return {name: getattr(config, name) for name in sections}


def reads_plain_weights(config: Config, role: Role) -> bool:
    """Whether its models are folders of plain weights that it reads whole, on a CPU. What a hub has is not known."""
    workers = _in_process(config, role).values()
    models = [worker.model for worker in workers]
    if role is Role.DRAFT and config.draft.assistant:
        models.append(config.draft.assistant)
    whole = all(worker.tensor_parallel_size == 1 and worker.quantization == "none" for worker in workers)
    whole = whole and all(on_cpu(worker.device) for worker in workers)  # elsewhere it was never tried
    return whole and all(stores_plain_weights(model) for model in models)


def stores_plain_weights(model: str) -> bool:
    """Whether a model is a folder whose weights are read as they are."""
    try:
        described = (expanded(model) / "config.json").read_bytes()
    except OSError:
        return False
    return not any(word in described for word in STORED_OTHERWISE)


def do_without() -> None:
    """Have this process do without :data:`UNUSED`, and transformers without distributed tensors, from now on.

    Comes before transformers is imported. The compiler still comes once something is really compiled.
    """
    import torch.distributed

    sys.modules.update(dict.fromkeys(UNUSED))  # type: ignore[arg-type]  # None: Python's own word for "not there"
    if _Compiler.NAME not in sys.modules:
        stand_in = sys.modules[_Compiler.NAME] = _Compiler()
        sys.meta_path.insert(0, _CompilerParts(stand_in))
    available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        from transformers.utils.import_utils import is_torch_distributed_available

        is_torch_distributed_available()  # it asks once
    finally:
        torch.distributed.is_available = available


def list_models_once() -> None:
    """Import transformers with what it lists of its models first in the place of what it would list again."""
    import transformers
    from transformers.utils import import_utils

    listing = import_utils.define_import_structure
    listed = listing(Path(transformers.__file__).parent / "models", prefix="models")  # kept, with other modules added
    prefix = "models."
    again = {
        needs: {name.removeprefix(prefix): defined for name, defined in modules.items() if name.startswith(prefix)}
        for needs, modules in listed.items()
    }
    import_utils.define_import_structure = lambda _: again  # type: ignore[assignment]
    try:
        importlib.import_module("transformers.models")
    finally:
        import_utils.define_import_structure = listing


class _Compiler(ModuleType):
    """Stands for torch._dynamo, a second of imports, for as long as functions are only marked for it.

    Nobody reads the marks. Whoever asks for anything else, or imports a part of the package, has all of it imported.
    """

    NAME = "torch._dynamo"
    LIGHT_PART = f"{NAME}._trace_wrapped_higher_order_op"
    """What the masks of transformers import of it, which needs nothing of the rest."""

    def __init__(self) -> None:
        super().__init__(self.NAME)
        spec = self.__spec__ = importlib.util.find_spec(self.NAME)
        assert spec is not None and spec.submodule_search_locations is not None
        self.__path__ = spec.submodule_search_locations

    @staticmethod
    def disable(fn: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
        return (lambda marked: marked) if fn is None else fn

    @staticmethod
    def allow_in_graph(fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn

    assume_constant_result = allow_in_graph

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.replaced(), name)

    def replaced(self) -> ModuleType:
        """The package itself, from now on."""
        if sys.modules.get(self.NAME) is self:
            del sys.modules[self.NAME]
            package = importlib.import_module(self.NAME)
            if light := sys.modules.get(self.LIGHT_PART):
                setattr(package, self.LIGHT_PART.rpartition(".")[2], light)
        return importlib.import_module(self.NAME)


class _CompilerParts(MetaPathFinder, Loader):
    """Imports parts of torch._dynamo: with them comes the whole package."""

    def __init__(self, stand_in: _Compiler) -> None:
        self._stand_in = stand_in

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        here = sys.modules.get(_Compiler.NAME) is self._stand_in
        if not here or not fullname.startswith(f"{_Compiler.NAME}.") or fullname == _Compiler.LIGHT_PART:
            return None
        self._stand_in.replaced()
        return ModuleSpec(fullname, self) if fullname in sys.modules else PathFinder.find_spec(fullname, path, target)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]  # which has come meanwhile

    def exec_module(self, module: ModuleType) -> None:
        pass
