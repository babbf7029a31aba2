"""The folder of an alignment: what it was asked for, what a run left to go on from, and in the end the model.

Settings are compared by value, so a run goes on only as the run that it is. Files of an unfinished run lie in a hidden
folder inside; the model is put beside it file by file, the configuration last, so nobody loads half of one. Every file
is there as a whole or not at all: written beside its place, flushed to the disk and then put there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from alignment.options import DiskError, SettingsError
from engine.model import first_line

WORK = ".align"
SETTINGS = "settings.json"
REPORT = "alignment.json"
LAST = "config.json"

Plain = Mapping[str, Any]
"""Values that JSON knows."""


class Workplace:
    """One output folder."""

    def __init__(self, out: Path, settings: Plain, *, resume: bool) -> None:
        """Make the folder, or take it over from an earlier run of the same settings.

        ``resume`` False: what an earlier run left to go on from is deleted; its model stays until there is another.
        Raises :class:`alignment.options.SettingsError` where the folder holds anything else.
        """
        self.out, self.work = out, out / WORK
        self._settings = json.loads(json.dumps(settings))
        try:
            if self._unused() or (not resume and self._mine()):
                shutil.rmtree(self.work, ignore_errors=True)  # nothing of other settings is gone on from
                (out / REPORT).unlink(missing_ok=True)
            else:
                self._check(out)
            self.work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"--out {out}: cannot be used: {error.strerror}") from error
        if not self.finished:
            write_whole(self.work / SETTINGS, lambda file: file.write(self._json(self._settings)))

    @property
    def finished(self) -> Plain | None:
        """The figures of a run that came to its end here."""
        path = self.out / REPORT
        return json.loads(path.read_text("utf-8"))["figures"] if path.exists() else None

    def finish(self, figures: Plain, save_model: Callable[[Path], None]) -> None:
        """Put the model and its figures in place. Raises :class:`alignment.options.DiskError`; then nothing is lost."""
        fresh = self.work / "model"
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            save_model(fresh)
            parts = sorted(fresh.iterdir(), key=lambda path: path.name == LAST)
            for part in parts:
                # safetensors makes its files private; a model is for everyone who may read the folder
                part.chmod(0o755 if part.is_dir() else 0o644)
                place = self.out / part.name
                if place.is_dir():  # further chat templates lie in one; only an empty one could be replaced
                    shutil.rmtree(place)
                part.replace(place)
        except Exception as error:  # writers of transformers and safetensors have exceptions of their own
            shutil.rmtree(fresh, ignore_errors=True)
            left = "the last checkpoint is still there, and the same command goes on from it"
            raise DiskError(f"{self.out}: the model cannot be written: {first_line(error)}; {left}") from error
        told_all = self._json({"settings": self._settings, "figures": figures})
        write_whole(self.out / REPORT, lambda file: file.write(told_all))
        shutil.rmtree(self.work, ignore_errors=True)

    def _mine(self) -> bool:
        return (self.work / SETTINGS).exists() or (self.out / REPORT).exists()

    def _unused(self) -> bool:
        """Whether nothing is there, or no more than the disk had room for before the settings, which come first."""
        out = self.out
        return not out.exists() or (
            out.is_dir() and {path.name for path in out.iterdir()} <= {WORK} and not self._mine()
        )

    def _check(self, out: Path) -> None:
        if not self._mine():
            raise SettingsError(f"--out {out}: is not empty, and no alignment's; give a folder that does not exist yet")
        done = out / REPORT
        if not done.exists() and [path.name for path in self.work.iterdir()] == [SETTINGS]:
            return  # nothing was done yet
        before = json.loads((done if done.exists() else self.work / SETTINGS).read_text("utf-8"))
        before = before["settings"] if done.exists() else before
        for name in sorted(before.keys() | self._settings.keys()):
            if before.get(name) != self._settings.get(name):
                said, wanted = (json.dumps(settings.get(name)) for settings in (before, self._settings))
                hint = "give the same, another folder, or --no-resume"
                raise SettingsError(f"--out {out}: begun with {name} {said}, now {wanted}; {hint}")

    @staticmethod
    def _json(value: object) -> bytes:
        return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Have ``write`` fill the file. Raises :class:`alignment.options.DiskError`; ``path`` then holds what it held."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        with fresh.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer says the second when the first happened to it
        fresh.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else error.__context__
        reason = getattr(cause, "strerror", None) or next(iter(str(error).splitlines()), "")
        kept = "the last one is still there, and " if path.exists() else ""
        hint = f"{kept}the same command goes on once there is room"
        raise DiskError(f"{path}: cannot be written: {reason}; {hint}") from error


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Tensors and plain values. Raises :class:`alignment.options.DiskError`; the checkpoint before is then kept."""
    write_whole(path, lambda file: torch.save(state, file))


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """What was written there; None if nothing was. Raises :class:`alignment.options.SettingsError`."""
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes torch raise
        raise SettingsError(f"{path}: not a checkpoint of this program; delete it to start over") from error
    return state
