"""Whether the GPUs of this container still answer: what a liveness probe asks, so that a pod ends whose GPU is gone.

    python -S -m engine.host.live_gpus

Asks the driver through its library of management (NVML), and nothing else: no torch, no CUDA context, some tens of
milliseconds. Status 1, and one line, if a GPU is lost or the driver no longer answers for any; 0 also where there is no
such library, since then nothing can be said.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Protocol

LIBRARY = "libnvidia-ml.so.1"
OK, LOST = 0, 15
"""Of NVML's return codes."""


class Nvml(Protocol):
    """What is asked of the library; every function returns one of its codes."""

    def nvmlInit_v2(self) -> int:  # noqa: N802
        """Reach the driver."""
        ...

    def nvmlDeviceGetCount_v2(self, count: object) -> int:  # noqa: N802
        """How many GPUs this container has."""
        ...

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: object) -> int:  # noqa: N802
        """One of them; fails where it has fallen off its bus."""
        ...

    def nvmlDeviceGetTemperature(self, handle: object, sensor: int, degrees: object) -> int:  # noqa: N802
        """Something that only a GPU which answers can say."""
        ...


def fault(nvml: Nvml) -> str:
    """What is wrong with the GPUs; empty if they all answer."""
    count = ctypes.c_uint()
    for name, code in (("nvmlInit", nvml.nvmlInit_v2()), ("count", nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))):
        if code != OK:
            return f"the driver does not answer ({name}: {code})"
    if not count.value:
        return "the driver knows no GPU"
    for index in range(count.value):
        handle, degrees = ctypes.c_void_p(), ctypes.c_uint()
        code = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        if code == OK:
            code = nvml.nvmlDeviceGetTemperature(handle, 0, ctypes.byref(degrees))
            code = code if code == LOST else OK  # some have no such sensor
        if code != OK:
            return f"GPU {index} does not answer ({'lost' if code == LOST else code})"
    return ""


def main() -> int:
    """The command."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        return 0
    found = fault(nvml)
    if found:
        sys.stderr.write(f"{found}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
