"""What the commands show while they work: progress on stderr, and nothing but results on stdout.

A terminal gets a spinner. Anything else (a log, a pipe) gets a plain line for a stage that takes longer than
:data:`SLOW_SECONDS`, and none for quick ones.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

SLOW_SECONDS = 2.0


class CommandError(Exception):
    """A command cannot go on. One line for the user, and the exit code."""

    def __init__(self, message: str, code: int) -> None:
        """``message`` says what would be right, where that is known."""
        super().__init__(message)
        self.code = code


def stderr_console() -> Console:
    """A console on stderr that leaves text as it is."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """One line on stdout, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """One line on stderr: the reason why a command fails, or what it noticed."""
    sys.stderr.write(f"{' '.join(text.split())}\n")
    sys.stderr.flush()


class Stages:
    """What is going on, told stage by stage; may be called from any thread."""

    def __init__(self, bars: Bars | None) -> None:
        """``bars`` is None when stderr is no terminal."""
        self._bars = bars
        self._tasks: dict[str, int] = {}
        self._timer: threading.Timer | None = None

    def __call__(self, text: str, line: str = "") -> None:
        """Say what happens now, on the named line (parallel work has several)."""
        if self._bars is None:
            self._later(f"{line}: {text}" if line else text)
            return
        shown = f"[bold]{escape(line)}[/bold] {escape(text)}" if line else escape(text)
        if line not in self._tasks:
            self._tasks[line] = self._bars.add_task(shown, total=None)
        else:
            self._bars.update(self._tasks[line], description=shown)  # type: ignore[arg-type]

    def _later(self, text: str) -> None:
        self.close()
        self._timer = threading.Timer(SLOW_SECONDS, complain, (f"{text} ...",))
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        """The current stage is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@contextmanager
def stages() -> Iterator[Stages]:
    """Show stages while the block runs."""
    console = stderr_console()
    if not console.is_terminal:
        shown = Stages(None)
        try:
            yield shown
        finally:
            shown.close()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        yield Stages(bars)
