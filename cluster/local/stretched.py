"""The bundled target at the cost of a larger model: what ``paceline up --stretched`` serves.

A model small enough for git decodes about as fast as messages travel, so drafting cannot pay for it. Stretching
(``models.stretch``) adds layers and width that change nothing in what the model says, only what it costs; the drafter
is the bundled draft as it is. It goes by the name of the bundled target, whose text it writes. Built once, in a folder
that git ignores, and again when a file of the bundled target has changed.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from cluster.config.config import Config
from cluster.config.environment import BUNDLED
from cluster.console import BadInput, CommandError, Stages

HIDDEN, LAYERS = 1024, 16
ABOUT = "about 190 million parameters"


def stretched(config: Config, report: Stages) -> Config:
    """The same configuration, with the stretched bundled target; raises CommandError if it cannot be built."""
    if config.models:
        raise BadInput("--stretched serves the bundled model only; leave out the section models")
    source = BUNDLED / "target"
    folder = BUNDLED / ".work" / f"stretched-{HIDDEN}-{LAYERS}"
    built = folder / "model.safetensors"
    if not built.exists() or built.stat().st_mtime < max(file.stat().st_mtime for file in source.iterdir()):
        report(f"stretching the bundled target to {ABOUT}")
        _stretch(source, folder)
    return replace(config, target=replace(config.target, model=str(folder), name=config.target.name or source.name))


def _stretch(source: Path, folder: Path) -> None:
    size = ["--hidden", str(HIDDEN), "--layers", str(LAYERS), "--noise", "0"]
    command = [sys.executable, "-m", "models.stretch", str(source), str(folder), *size]
    done = subprocess.run(command, cwd=BUNDLED.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CommandError(f"cannot stretch the bundled target: {why}")
