"""``paceline align draft``: a draft model distilled on its target's own samples.

Also what all commands of ``paceline align`` have in common: flags, their bounds, and a run that was done before.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from cluster.config.flags import BAD_INPUT, Parser, number, values
from cluster.console import CommandError, complain, say
from cluster.local.threads import usable_cores

if TYPE_CHECKING:  # they bring torch
    from alignment.distillation import DistillationOptions, DistillationOutcome
    from alignment.workplace import Workplace

ABOUT = "distil a draft model on the target's own samples"
DETAILS = """\
The target continues prompts that are cut from the data; the draft learns the target's distributions on that, and on
the data itself. What is held out of the data is never trained on: acceptance there is measured on the way, the best
weights are kept, and training ends early when nothing gets better. A run that is stopped goes on when it is given
again. The defaults suit small models on a CPU; for a draft of a billion parameters on a GPU, begin with

  paceline align draft --target ./llama-8b --draft ./llama-1b --data ./texts ./recorded-prompts --out ./aligned \\
    --device cuda --dtype bf16 --steps 4000 --batch-tokens 16384 --sequence 2048 --samples 10000000

Data are UTF-8 text and JSON lines with "text", "prompt" (and "completion") or "messages", as `--record-prompts` writes
them.
"""
DTYPES = ("auto", "bfloat16", "bf16", "float32", "fp32", "float64", "fp64")
"""16-bit floats without bfloat16's range lose gradients."""
Limits = tuple[int | float, float, float, str]
"""Default, minimum, maximum, and what it is."""
OBJECTIVES = ("forward-kl", "reverse-kl", "tv")
NUMBERS: dict[str, Limits] = {
    "samples": (200_000, 1000, 10**10, "tokens that the target writes"),
    "new_tokens": (128, 8, 4096, "longest continuation that it writes"),
    "data_tokens": (1_000_000, 1000, 10**10, "most tokens that are taken from the data, from all over it"),
    "data_share": (0.25, 0.0, 0.9, "share of the batches that are data, not samples"),
    "steps": (400, 1, 10**7, "steps of training, at most"),
    "batch_tokens": (4096, 16, 1 << 22, "tokens of a step"),
    "sequence": (512, 16, 1 << 20, "tokens of a sequence"),
    "rate": (0.0, 0.0, 1.0, "peak learning rate (default: 0.2 / hidden size)"),
    "seed": (0, 0, 2**31, "same seed, same draft"),
}
MAX_TEMPERATURE = 2.0


def add(parser: Parser) -> None:
    """Its flags."""
    add_flags(parser, NUMBERS, "folder for the aligned draft")
    flag = parser.add_argument
    flag("--draft", required=True, metavar="MODEL", help="folder or hub id of the draft to begin with")
    about = "what is made small: a Kullback-Leibler divergence, or total variation, which is what acceptance loses"
    flag("--objective", choices=OBJECTIVES, default="forward-kl", help=f"{about} (default: forward-kl)")
    about = "of the target's samples; repeat, or separate by commas (default: 0,0.8,1)"
    flag("--temperature", action="append", metavar="X,Y", help=about)


def run(args: argparse.Namespace) -> int:
    """Distil and report."""
    check_flags(args, NUMBERS)
    options = _options(args)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    from alignment.data import find_data
    from alignment.distillation import Distillation, DistillationOutcome
    from alignment.encoding import Encoder, tokenizer_of
    from alignment.pair import load_pair, settings_of
    from alignment.workplace import Workplace

    data = find_data(args.data)
    pair = load_pair(args.target, args.draft, args.dtype, args.device, args.threads)
    if not options.new_tokens + 1 < options.sequence <= pair.context:
        wanted = f"more than --new-tokens ({options.new_tokens}) and at most the context ({pair.context})"
        raise CommandError(f"--sequence must be {wanted}, got {options.sequence}", BAD_INPUT)
    if options.batch_tokens < options.sequence:
        wanted = f"at least --sequence ({options.sequence})"
        raise CommandError(f"--batch-tokens must be {wanted}, got {options.batch_tokens}", BAD_INPUT)
    settings = settings_of(options, data, target=pair.target, draft=pair.draft)
    place = Workplace(args.out, settings, resume=args.resume)
    if figures := done_before(place):
        return _tell(DistillationOutcome(**figures), args.out)
    encoder = Encoder(tokenizer_of(args.target))
    with _stopping() as stopped:
        outcome = Distillation(pair, encoder, options, place, stopped, complain).run(data)
    return _tell(outcome, args.out)


def _tell(outcome: DistillationOutcome, out: Path) -> int:
    from rich.console import Console

    from alignment.report import plot, table, verdict

    Console(highlight=False).print(table(outcome))
    drawn = plot(outcome, out)
    say(verdict(outcome, out))
    say(f"plot: {drawn}" if drawn else "no plot: matplotlib is not installed")
    return 0


def _options(args: argparse.Namespace) -> DistillationOptions:
    """What the flags amount to. Raises CommandError."""
    temperatures = values(args, "temperature", "0,0.8,1", partial(number, maximum=MAX_TEMPERATURE))
    from alignment.distillation import DistillationOptions

    return DistillationOptions(
        objective=args.objective, temperatures=temperatures, **{name: getattr(args, name) for name in NUMBERS}
    )


@contextmanager
def _stopping() -> Iterator[Stopped]:
    """Ask what this gives whether the user wants to stop; a second signal does not wait."""
    stopped = Stopped()
    before = {number: signal.signal(number, stopped.take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stopped:
    """Whether a signal has come."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self) -> bool:
        """Ask."""
        return self._told

    def take(self, number: int, _frame: FrameType | None) -> None:
        """A signal."""
        self._told = True
        signal.signal(number, signal.SIG_DFL)
        complain("paceline: stopping after this step, with a checkpoint; once more to stop at once")


def add_flags(parser: Parser, numbers: Mapping[str, Limits], out: str) -> None:
    """Those of all. ``numbers``: flags that take one; ``out``: what ``--out`` is."""
    flag = parser.add_argument
    flag("--target", required=True, metavar="MODEL", help="folder or hub id of the target")
    flag("--data", type=Path, required=True, nargs="+", metavar="PATH", help="files, or folders of them")
    flag("--out", type=Path, required=True, metavar="DIR", help=out)
    for name, (default, _, _, about) in numbers.items():
        text = about if "(default:" in about else f"{about} (default: {default})"
        metavar = "N" if isinstance(default, int) else "X"
        flag(f"--{name.replace('_', '-')}", type=type(default), default=default, metavar=metavar, help=text)
    flag("--device", default="auto", metavar="TEXT", help="auto, cpu or cuda (default: auto)")
    flag("--dtype", choices=DTYPES, default="auto", help="working precision; weights are fp32 (default: auto)")
    flag("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")
    about = "go on with what an earlier run left in --out, or delete that and start over (default: go on)"
    flag("--resume", action=argparse.BooleanOptionalAction, default=True, help=about)


def check_flags(args: argparse.Namespace, numbers: Mapping[str, Limits]) -> None:
    """Raises CommandError for a number out of bounds, or more threads than cores."""
    for name, (_, minimum, maximum, _) in numbers.items():
        value = getattr(args, name)
        if not minimum <= value <= maximum:
            flag = f"--{name.replace('_', '-')}"
            raise CommandError(f"{flag} must be from {minimum} to {maximum}, got {value}", BAD_INPUT)
    cores = usable_cores()
    if not 1 <= args.threads <= cores:
        raise CommandError(f"--threads must be 1 to {cores}, the cores usable here, got {args.threads}", BAD_INPUT)


def done_before(place: Workplace) -> Mapping[str, Any] | None:
    """The figures of a run of the same settings that came to its end in this folder, which is said."""
    if place.finished is not None:
        complain(f"paceline: --out {place.out}: done before with the same settings; --no-resume starts over")
    return place.finished
