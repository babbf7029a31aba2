"""A fingerprint of what a model says: its files, number format, quantisation, and what decides how sums are rounded.

Two workers of one model name with the same fingerprint continue each other's text; others may not. What rounds
differently (ranks, kernels, kinds of devices, steps that are not exact) is for :func:`engine.build.welcome` to name. It
has to be quick even for weights of hundreds of gigabytes, so of each file it reads the beginning, where the format
keeps its table of contents, and samples spread over the rest. Against mistakes, not against forgery.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from transformers.utils.hub import cached_file

PATTERNS = ("config.json", "*.safetensors", "*.bin")
HEAD_BYTES = 1 << 20
SAMPLES, SAMPLE_BYTES = 64, 4096


def revision_of(model: str, number_format: str) -> int:
    """64 bits, never 0; or 0 if the files cannot be read. ``model``: a folder, or a hub id that was loaded before."""
    digest = hashlib.blake2b(number_format.encode(), digest_size=8)
    try:
        folder = _folder(model)
        files = sorted({path for pattern in PATTERNS for path in folder.glob(pattern)})
        for path in files:
            digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
            _sample(path, digest)
    except OSError:
        return 0
    return (int.from_bytes(digest.digest(), "big") or 1) if files else 0


def _folder(model: str) -> Path:
    """Where its files lie. Raises OSError."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    found = cached_file(model, "config.json", local_files_only=True)
    if found is None:
        raise FileNotFoundError(model)
    return Path(found).parent


def _sample(path: Path, digest: hashlib.blake2b) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        digest.update(file.read(HEAD_BYTES))
        for number in range(SAMPLES if size > HEAD_BYTES else 0):
            file.seek(HEAD_BYTES + (size - HEAD_BYTES) * number // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
