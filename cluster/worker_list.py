"""A list of workers in a file, for clusters without Ray; read again whenever it changes.

One worker a line, its role and its address::

    # rack 1
    target 10.0.0.5:7001
    draft  10.0.0.6:7002

An edit that cannot be read changes nothing: the list before it stays in force, and the log says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.discovery import Changed
from speculation.events import Role
from transport.address import AddressError, parse
from transport.files import stamp

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
MAX_BYTES = 1 << 20
Workers = Mapping[Role, Sequence[str]]
"""Addresses by role, in the order of the file; every role has an entry."""


class WorkerListError(Exception):
    """A list that cannot be used. One line that names the file, the line and what would be right."""


class FileDirectory:
    """Tells what the file says, at once and after every change that can be read."""

    def __init__(self, file: Path, poll_seconds: float = POLL_SECONDS) -> None:
        """Reads the file; raises :class:`WorkerListError`."""
        self._file, self._poll_seconds = file, poll_seconds
        self._seen = stamp(file)
        self.workers = read_list(file)
        self._task: asyncio.Task[None] | None = None

    def start(self, changed: Changed) -> None:
        """Begin to tell."""
        for role, addresses in self.workers.items():
            changed(role, addresses)
        self._task = asyncio.create_task(self._watch(changed), name=f"watch {self._file}")

    def close(self) -> None:
        """Stop telling."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self, changed: Changed) -> None:
        while True:
            await asyncio.sleep(self._poll_seconds)
            seen = stamp(self._file)
            if seen != self._seen:
                self._seen = seen
                self._read_again(changed)

    def _read_again(self, changed: Changed) -> None:
        try:
            workers = read_list(self._file)
        except WorkerListError as error:
            log.error("%s; the list before it stays in force", error)
            return
        for role, addresses in workers.items():
            if addresses != self.workers[role]:
                log.info("%s lists %d %s workers", self._file, len(addresses), role)
                changed(role, addresses)
        self.workers = workers


def read_list(file: Path) -> Workers:
    """The workers that a file lists. Raises :class:`WorkerListError`."""
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_BYTES + 1).decode("utf-8")
    except OSError as error:
        raise WorkerListError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise WorkerListError(f"{file}: is not a text file") from error
    if len(text) > MAX_BYTES:
        raise WorkerListError(f"{file}: is larger than {MAX_BYTES >> 20} MiB; give a list of workers")
    found: dict[Role, dict[str, None]] = {role: {} for role in Role}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            role, address = _worker(f"{file}, line {number}", words)
            found[role][address] = None
    if not found[Role.TARGET]:
        raise WorkerListError(f"{file}: lists no target worker; a line such as 'target 10.0.0.5:7001' does")
    return {role: list(addresses) for role, addresses in found.items()}


def _worker(where: str, words: Sequence[str]) -> tuple[Role, str]:
    roles = {role.value: role for role in Role}
    if len(words) != 2 or words[0] not in roles:
        raise WorkerListError(f"{where}: must be 'target HOST:PORT' or 'draft HOST:PORT', got {' '.join(words)!r}")
    try:
        parse(words[1])
    except AddressError as error:
        raise WorkerListError(f"{where}: {error}") from error
    return roles[words[0]], words[1]
