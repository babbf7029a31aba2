"""Whether the GPUs of this container still answer: what a liveness probe asks, so that a pod ends whose GPU is gone.

    python -S -m engine.host.live_gpus

Asks the driver through its library of management (NVML), and nothing else: no torch, no CUDA context, some tens of
milliseconds. Status 1, and one line, if a GPU is lost or the driver no longer answers for any; 0 also where there is no
such library, since then nothing can be said.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
OK, NOT_OURS, LOST = 0, 4, 15
"""Of NVML's return codes."""


def fault(nvml: Any) -> str:
    """What is wrong with the GPUs that this library (of ctypes) tells of; empty if they all answer."""
    count = ctypes.c_uint()
    for name, code in (("nvmlInit", nvml.nvmlInit_v2()), ("count", nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))):
        if code != OK:
            return f"the driver does not answer ({name}: {code})"
    ours = False
    for index in range(count.value):
        handle, degrees = ctypes.c_void_p(), ctypes.c_uint()
        code = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        if code == NOT_OURS:  # it is another container's
            continue
        ours = True
        if code == OK:
            code = nvml.nvmlDeviceGetTemperature(handle, 0, ctypes.byref(degrees))
            code = code if code == LOST else OK  # some have no such sensor
        if code != OK:
            return f"GPU {index} does not answer ({'lost' if code == LOST else code})"
    return "" if ours else "the driver knows no GPU"


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
