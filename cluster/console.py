"""What the commands show while they work: progress on stderr, and nothing but results on stdout.

A result that cannot be written is an error. What is only told is not: a reader that has gone, or a full disk, ends
nothing that serves.

A terminal gets a spinner. Anything else (a log, a pipe) gets a plain line for a stage that takes longer than
:data:`SLOW_SECONDS`, and none for quick ones.
"""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import IO, Any, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

SLOW_SECONDS = 2.0
BAD_INPUT, FAILED = 2, 1
"""Exit codes: for what the user gave, and for what went wrong later."""
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal obeys, but for ends of lines and tabs."""


class CommandError(Exception):
    """A command cannot go on. One line for the user, and the exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


class BadInput(CommandError):
    """What was given is of no use. One line that says what would be right."""

    def __init__(self, message: str) -> None:
        super().__init__(message, BAD_INPUT)


def clean(text: str) -> str:
    """Without anything that a terminal would obey, but for the ends of lines, which are those of Unix, and tabs."""
    return OBEYED.sub("?", text.replace("\r", ""))


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class _StandardError:
    """The stream that is there at the moment; what it does not take is lost."""

    def write(self, text: str) -> int:
        """All of it, as far as anybody knows."""
        with suppress(OSError, ValueError, AttributeError):  # ValueError: closed; AttributeError: there was none
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """At once."""
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


_STANDARD_ERROR = _StandardError()


def stderr_console() -> Console:
    """A console on stderr that leaves text as it is, and never fails."""
    return Console(file=cast(IO[str], _STANDARD_ERROR), highlight=False, soft_wrap=True)


def spell_out() -> None:
    """Have stdout write the number of a character that its encoding lacks, where it would refuse the text."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        with suppress(OSError, ValueError):  # as what is written later: closed, or full
            sys.stdout.reconfigure(errors="backslashreplace")


def write(text: str) -> None:
    """Some of a result on stdout, at once. Raises :class:`CommandError` when it cannot be written."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError) as error:
        why = getattr(error, "strerror", None) or "standard output is closed"
        raise CommandError(f"cannot write the result: {why}") from error


def say(text: str) -> None:
    """One line of a result on stdout. Raises :class:`CommandError` when it cannot be written."""
    write(f"{text}\n")


def tell(text: str) -> None:
    """One line on stdout for whoever watches something that serves, which goes on when nobody does."""
    with suppress(CommandError):
        say(text)


def complain(text: str) -> None:
    """One line on stderr: the reason why a command fails, or what it noticed. Never fails."""
    _STANDARD_ERROR.write(f"{clean(' '.join(text.split()))}\n")
    _STANDARD_ERROR.flush()


def let_go() -> None:
    """Drop what standard streams could not write, so that the interpreter does not fail on it when it ends."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except ValueError:
            pass  # it is closed
        except OSError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


class Stages:
    """What is going on, told stage by stage; may be called from any thread."""

    def __init__(self, bars: Bars | None) -> None:
        """``bars`` is None when stderr is no terminal."""
        self._bars = bars
        self._tasks: dict[str, int] = {}
        self._timer: threading.Timer | None = None

    def __call__(self, text: str, line: str = "") -> None:
        """Say what happens now, on the named line (parallel work has several)."""
        text, line = clean(text), clean(line)
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
        with closing(Stages(None)) as shown:
            yield shown
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        yield Stages(bars)
