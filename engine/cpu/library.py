"""The C++ of :mod:`engine.cpu`: built for this processor, loaded, called.

Decides where it comes from: it is compiled once, for the level of instructions that this processor has (x86-64-v3 or
v4, as compilers call them), by whichever C++ compiler is here, and kept beside its source, so that ``make setup`` or an
image can bring it along. Where that cannot be, there is none, and the log says why in one line. The library is plain C
to its callers: no Python, no torch; a call lets other threads of Python run.

Tensor legend: T rows, D hidden size, E head size, O outputs, I inputs, P panels of W = 2 * :attr:`Library.width`
outputs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.cpu.thread_choice import COUNTS, MIN_ROWS
from engine.model import first_line

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")

FLAGS = ("-std=c++20", "-O3", "-shared", "-fPIC", "-pthread")

COMPILERS = ("g++", "clang++", "c++")
"""In the order they are tried, after the one that torch compiles extensions with: ``CXX``, else ``c++``."""

COMPILE_SECONDS = 300.0

V4 = frozenset({"avx2", "fma3", "avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"})

LEVELS = {
    "x86-64-v4+avx512bf16": V4 | {"avx512_bf16"},
    "x86-64-v4": V4,
    "x86-64-v3": frozenset({"avx2", "fma3", "bmi2", "f16c"}),
}
"""What a processor of each level has, as torch calls it; the best one first. Named as compilers call it, and what they
are to use besides."""

DTYPES = frozenset({torch.float32, torch.bfloat16})


class CLayer(Structure):
    """``Layer`` in ``layout.h``."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "output", "gate_up", "down")),
        *((f"{name}_bias", c_void_p) for name in ("qkv", "output", "gate_up", "down")),
        *((f"{name}_norm", c_void_p) for name in ("input", "mlp", "query", "key")),
        *((name, c_void_p) for name in ("keys", "values", "sinks")),
        *((name, c_float) for name in ("scaling", "cap", "input_eps", "mlp_eps", "query_eps", "key_eps")),
        *((name, c_int) for name in ("window", "gelu")),
    )


class CStack(Structure):
    """``Stack`` in ``layout.h``."""

    _fields_ = (
        ("layers", POINTER(CLayer)),
        ("norm", c_void_p),
        ("eps", c_float),
        *((name, c_int) for name in ("count", "hidden", "query_heads", "key_heads", "head_size", "value_size")),
        ("intermediate", c_int),
        ("half", c_int),
        ("embedding_norm", c_void_p),
        ("embedding_eps", c_float),
        ("from_normed", c_int),
    )


ROW_COLUMNS = ("slots", "keys", "home", "pages", "branch", "group", "common", "reach")


class CRows(Structure):
    """``Rows`` in ``layout.h``."""

    _fields_ = (
        ("count", c_int),
        ("page", c_int),
        *((name, c_void_p) for name in (*ROW_COLUMNS, "numbers")),
        ("kept", POINTER(c_int)),
        ("states", c_void_p),
        ("kept_count", c_int),
    )


class CDrafter(Structure):
    """``Drafter`` in ``layout.h``."""

    _fields_ = (
        ("stack", POINTER(CStack)),
        *((name, c_void_p) for name in ("head", "head_bias", "embedding", "frequencies")),
        ("rotary_scale", c_float),
        ("page", c_int),
        ("next", c_void_p),
        ("ids", c_void_p),
        ("outputs", c_int),
        ("next_normed", c_int),
    )


class CLaunch(Structure):
    """``Launch`` in ``levels.h``."""

    _fields_ = (
        *((name, c_int) for name in ("sessions", "width", "children", "leaves", "levels", "group", "spare")),
        *((name, c_int) for name in ("vocabulary", "record", "branch", "stops", "told", "noisy")),
        *((name, c_int) for name in ("ranks", "bins", "distances", "rivals", "no_leaf", "given")),
        *((name, c_double) for name in ("min_confidence", "min_odds", "max_odds")),
        *((name, c_void_p) for name in ("depths", "odds", "factor", "temperature", "min_weight", "weight")),
        *((name, c_void_p) for name in ("leaf_weight", "seed", "max_width", "max_children", "position", "max_end")),
        *((name, c_void_p) for name in ("table", "stop", "leaf_token", "slot")),
        *((name, c_void_p) for name in ("given_end", "given_home", "given_branch", "before")),
        *((name, c_void_p) for name in ("level", "branches", "home", "end", "leaf_chance", "token")),
        *((name, c_void_p) for name in ("place_weight", "found", "tokens", "positions", "slots", "keys", "homes")),
        *((name, c_void_p) for name in ("pages", "groups", "commons", "numbers")),
    )


class Library:
    """The compiled functions. One call computes at a time, with the team of so many threads that all calls share.

    What computes raises MemoryError where there is no memory for it.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be loaded."""
        self._c = ctypes.CDLL(str(path))
        pointer, stack, rows = c_void_p, POINTER(CStack), POINTER(CRows)
        self._c.paceline_product.argtypes = (pointer, pointer, c_int, c_int, c_int, pointer, c_int, pointer, c_int)
        self._c.paceline_step.argtypes = (stack, rows, pointer, pointer, pointer, pointer, pointer, c_int)
        self._c.paceline_attend.argtypes = (stack, POINTER(CLayer), rows, pointer, pointer, c_int)
        launch = POINTER(CLaunch)
        self._c.paceline_begin.argtypes = (launch,)
        self._c.paceline_expand.argtypes = (launch, pointer, c_int)
        self._c.paceline_launch.argtypes = (launch, POINTER(CDrafter), pointer, c_int, c_int)
        for name in ("product", "step", "attend", "launch"):
            getattr(self._c, f"paceline_{name}").errcheck = _expect_memory
        self.width: int = self._c.paceline_width()
        """Floats of a vector of this processor."""
        self.pairs = bool(self._c.paceline_pairs())
        """Whether it multiplies bfloat16 by pairs of inputs, which are rounded to it; else it widens weights."""

    def pack(self, weight_OI: Tensor) -> Tensor:
        """A weight as products read it, ``[P, I, W]`` in memory, of the same dtype; outputs are filled up with zeros.

        In bfloat16 a word holds one output's weights of two inputs, or where the processor does not multiply such
        pairs, of one input the weights of an output in each half of the panel. Inputs: a multiple of
        :attr:`width`.
        """
        outputs, inputs = weight_OI.shape
        panel = 2 * self.width
        padded_OI = torch.nn.functional.pad(weight_OI, (0, 0, 0, -outputs % panel))
        if weight_OI.dtype == torch.bfloat16 and self.pairs:
            return padded_OI.view(-1, panel, inputs // 2, 2).transpose(1, 2).reshape(-1, inputs, panel).contiguous()
        packed_PIW = padded_OI.view(-1, panel, inputs).transpose(1, 2)
        if weight_OI.dtype == torch.bfloat16:
            packed_PIW = packed_PIW.reshape(*packed_PIW.shape[:2], 2, -1).transpose(-1, -2).flatten(-2)
        return packed_PIW.contiguous()

    def unpack(self, packed_PIW: Tensor, outputs: int) -> Tensor:
        """What :meth:`pack` was given."""
        panels, inputs, panel = packed_PIW.shape
        if packed_PIW.dtype == torch.bfloat16 and self.pairs:
            by_output = packed_PIW.view(panels, inputs // 2, panel, 2).transpose(1, 2)
            return by_output.reshape(-1, inputs)[:outputs].contiguous()
        if packed_PIW.dtype == torch.bfloat16:
            packed_PIW = packed_PIW.reshape(*packed_PIW.shape[:2], -1, 2).transpose(-1, -2).flatten(-2)
        return packed_PIW.transpose(1, 2).flatten(0, 1)[:outputs].contiguous()

    def product(self, packed_PIW: Tensor, bias_O: Tensor | None, outputs: int, x_TI: Tensor) -> Tensor:
        """``x @ weight.T + bias`` in float32, ``[T, O]``. ``x_TI``, ``bias_O``: float32, contiguous."""
        rows, inputs = x_TI.shape
        out_TO = x_TI.new_empty(rows, outputs)
        half = int(packed_PIW.dtype == torch.bfloat16)
        threads = COUNTS.few if rows < MIN_ROWS else COUNTS.most
        bias = None if bias_O is None else bias_O.data_ptr()
        self._c.paceline_product(
            packed_PIW.data_ptr(), bias, half, inputs, outputs, x_TI.data_ptr(), rows, out_TO.data_ptr(), threads
        )
        return out_TO

    def step(
        self,
        stack: CStack,
        rows: CRows,
        hidden_TD: Tensor,
        angles_TE: tuple[Tensor, Tensor],
        threads: int,
        embeddings_TD: Tensor | None = None,
    ) -> Tensor:
        """All layers and the final norm, ``[T, D]``; ``hidden_TD`` becomes what comes before that norm.

        All tensors float32 and contiguous. ``angles_TE``: cosines and sines. ``embeddings_TD``: of a head, whose states
        are ``hidden_TD``.
        """
        out_TD = torch.empty_like(hidden_TD)
        embeddings = None if embeddings_TD is None else embeddings_TD.data_ptr()
        cos, sin = (each.data_ptr() for each in angles_TE)
        self._c.paceline_step(stack, rows, hidden_TD.data_ptr(), embeddings, cos, sin, out_TD.data_ptr(), threads)
        return out_TD

    def attend(self, stack: CStack, layer: CLayer, rows: CRows, query_TQE: Tensor, threads: int) -> Tensor:
        """The attention of one layer alone, ``[T, Q, V]``. ``query_TQE``: float32, contiguous."""
        out_TQV = query_TQE.new_empty(*query_TQE.shape[:2], stack.value_size)
        self._c.paceline_attend(stack, layer, rows, query_TQE.data_ptr(), out_TQV.data_ptr(), threads)
        return out_TQV

    def launch(self, launch: CLaunch, drafter: CDrafter, logits_MV: Tensor, levels: int, threads: int) -> None:
        """All levels of a launch, the first of which said ``logits_MV``: float32, contiguous."""
        self._c.paceline_launch(launch, drafter, logits_MV.data_ptr(), levels, threads)

    def begin_launch(self, launch: CLaunch) -> None:
        """Take in what a launch was told."""
        self._c.paceline_begin(launch)

    def expand_level(self, launch: CLaunch, logits_MX: Tensor) -> None:
        """What the rows of a level said, and the rows of the next one. ``logits_MX``: float32, contiguous."""
        self._c.paceline_expand(launch, logits_MX.data_ptr(), logits_MX.shape[1])


def _expect_memory(failed: int, *_: Any) -> None:
    if failed:
        raise MemoryError("there is no memory for a step")


@functools.cache
def find_library() -> Library | None:
    """The library for this machine, compiled if need be; None if there is none, which is logged."""
    try:
        return Library(build(level_here()))
    except (OSError, subprocess.SubprocessError, Unbuildable) as reason:
        log.warning("decoder layers are computed without C++, which is slower: %s", first_line(reason))
        return None


class Unbuildable(Exception):
    """There is no C++ library on this machine; one line says why."""


def level_here() -> str:
    """The best of :data:`LEVELS` that this processor has; raises :class:`Unbuildable`."""
    features = cpu_features()
    for level, needed in LEVELS.items():
        if needed <= features:
            return level
    missing = sorted(next(reversed(LEVELS.values())) - features)
    raise Unbuildable(f"this processor lacks {', '.join(missing)}")


def build(level: str) -> Path:
    """Where the library for a level lies, compiled now if it was not yet.

    Raises :class:`Unbuildable`, OSError or SubprocessError.
    """
    sources = b"".join(path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h"))))
    digest = hashlib.blake2b(sources + repr(FLAGS).encode(), digest_size=8).hexdigest()
    folders = (SOURCE.parent / "built", Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}")
    paths = [folder / f"kernels-{level}-{digest}.so" for folder in folders]
    if found := next(filter(_ours, paths), None):
        return found
    from torch.utils.cpp_extension import get_cxx_compiler  # a quarter of a second, for this alone

    names = filter(None, (get_cxx_compiler(), *COMPILERS))  # type: ignore[no-untyped-call]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise Unbuildable(f"there is no C++ compiler: none of {', '.join(COMPILERS)} is installed")
    path = next((path for path in paths if _writable(path.parent)), None)
    if path is None:
        raise Unbuildable(f"there is nowhere to put it: not in {', not in '.join(map(str, folders))}")
    _compile(compiler, level, path)
    return path


def _writable(folder: Path) -> bool:
    """Whether this user alone can put something there, which all may read; the folder is made if need be.

    Whoever sets up or makes an image is root, and workers are not.
    """
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
        return os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid() and _guarded(folder, stat.S_ISDIR)
    except OSError:
        return False


def _ours(path: Path) -> bool:
    """Whether there is such a library, and nobody else could have put it there."""
    try:
        return _guarded(path.parent, stat.S_ISDIR) and _guarded(path, stat.S_ISREG) and path.stat().st_size > 0
    except OSError:
        return False


def _guarded(path: Path, kind: Callable[[int], bool]) -> bool:
    """Whether it is of this kind, and only this user and root could have put it there; raises OSError.

    Beside the source links are followed, and a group may write: who could make either may change the source too.
    """
    beside = SOURCE.parent in path.parents
    there = path.stat() if beside else path.lstat()
    others = stat.S_IWOTH if beside else stat.S_IWOTH | stat.S_IWGRP
    return kind(there.st_mode) and there.st_uid in (os.getuid(), 0) and not there.st_mode & others


def _compile(compiler: str, level: str, path: Path) -> None:
    """Whole or not at all, also where several workers start at once."""
    architecture, *more = level.split("+")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *FLAGS, f"-march={architecture}", *(f"-m{name}" for name in more)]
        with subprocess.Popen(
            [*command, "-o", str(made), str(SOURCE)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0,
        ) as process:  # fmt: skip
            try:
                _, said = process.communicate(timeout=COMPILE_SECONDS)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # the compiler proper is a process of its own
                raise
        if process.returncode:
            why = next((line for line in said.splitlines() if "error" in line), f"exit {process.returncode}")
            raise Unbuildable(f"{compiler} cannot compile {SOURCE.name}: {why.strip()}")
        made.chmod(0o755)  # whatever the umask: what others may write is not loaded
        made.replace(path)


def cpu_features() -> frozenset[str]:
    """What this processor can do, as torch calls it."""
    return frozenset(name for name, there in torch.cpu.get_capabilities().items() if there is True)


if __name__ == "__main__":
    # For `make setup` and images, so that no worker waits for the compiler; by default the level of this machine.
    try:
        for wanted in sys.argv[1:] or [level_here()]:
            build(wanted)
    except (OSError, subprocess.SubprocessError, Unbuildable) as refusal:
        sys.stderr.write(f"CPU workers will compute without C++, which is slower: {first_line(refusal)}\n")
