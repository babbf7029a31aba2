"""What Paceline reads of the environment it is started in; nothing else of it does. Its own settings are in files.

Variables, folders, and whether there are GPUs. All of the variables are said by others: systemd, CUDA, the XDG base
directories, OpenAI's clients, OpenTelemetry, and Ray, which hands a replica its settings that way.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
BUNDLED = CHECKOUT / "models"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
"""One of these is there where torch may find a GPU. Asking torch itself would cost every start two seconds."""
COMMIT = "[0-9a-f]{40}"
"""How a hub names a model's commit."""
REPLICA_SETTINGS = "PACELINE_SETTINGS"
"""Variable with the settings of a replica, in JSON."""


def current() -> dict[str, str]:
    """All of it, for a process that is started with more."""
    return dict(os.environ)


def variable(name: str) -> str:
    """One of it; empty where it is not set."""
    return os.environ.get(name, "")


def api_key() -> str:
    """The key that clients of OpenAI's send; empty for none."""
    return variable("OPENAI_API_KEY")


def otlp_endpoint() -> str:
    """Where OpenTelemetry's variables say that spans go; empty where they say nothing."""
    return variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or variable("OTEL_EXPORTER_OTLP_ENDPOINT")


def cache_folder() -> Path:
    """Where the XDG base directory specification puts caches, which says to ignore a relative path.

    Relative itself where nobody has a home: then nothing is kept.
    """
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return chosen if chosen.is_absolute() else expanded("~/.cache")


def may_have_gpus() -> bool:
    """Whether torch may find a GPU here."""
    return any(path.exists() for path in GPU_DEVICES)


def on_cpu(device: str) -> bool:
    """Whether a worker set to this device computes on the CPU here, as far as that is known without torch."""
    return device == "cpu" or (device == "auto" and not may_have_gpus())


def visible_gpu(number: int) -> str:
    """What CUDA calls the GPU of this number among those that may be seen; empty where there is none."""
    if VISIBLE_GPUS not in os.environ:
        return str(number)
    visible = variable(VISIBLE_GPUS).split(",")
    return visible[number] if number < len(visible) else ""


def expanded(path: str) -> Path:
    """With the home folder that ``~`` stands for; as it is written where nobody has such a home."""
    return Path(os.path.expanduser(path))


def pinned(model: str) -> tuple[str, str] | None:
    """Hub id and commit of a model that is given as HUB-ID@COMMIT; None where it is given otherwise."""
    name, at, commit = model.partition("@")
    return (name, commit) if at and re.fullmatch(r"[\w.-]+/[\w.-]+", name) else None


def pinned_folder(model: str) -> Path | None:
    """Where the hub's cache on this machine has a model given as HUB-ID@COMMIT; None where it has not. Asks no hub."""
    pin = pinned(model)
    if pin is None or not re.fullmatch(COMMIT, pin[1]):
        return None
    from huggingface_hub import try_to_load_from_cache  # only for such models

    found = try_to_load_from_cache(pin[0], "config.json", revision=pin[1])
    return Path(found).parent if isinstance(found, str) else None


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """In one go: nobody ever reads half a file, or a secret before its mode is set. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(handle, "wb") as file:
            os.fchmod(handle, mode)
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; where the name is too long for one, or cannot be looked up, there is none."""
    return os.path.isdir(path)
