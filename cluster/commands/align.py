"""``paceline align``: what drafts, made better at what one target says.

A draft model, or an EAGLE-3 head, which drafts from what the target itself computes.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields
from functools import partial
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from alignment.options import DistillationOptions, EagleOptions
from cluster.config.flags import Parser, flag_of, number, values
from cluster.console import BadInput, CommandError, complain, say
from cluster.local.threads import usable_cores

if TYPE_CHECKING:  # they bring torch
    from alignment.distillation import DistillationOutcome
    from alignment.workplace import Workplace

ABOUT = "train what drafts on what the target itself says"
DETAILS = """\
The text of a deployment never depends on it; its speed does, and so does what a prompt costs.

  paceline align draft --target ./llama-8b --draft ./llama-1b --data ./texts --out ./llama-1b-aligned
  paceline align eagle --target ./llama-8b --data ./texts --out ./llama-8b-eagle
"""
INTERRUPTED = 130
DTYPES = ("auto", "bfloat16", "bf16", "float32", "fp32", "float64", "fp64")
"""16-bit floats without bfloat16's range lose gradients."""
OBJECTIVES = ("forward-kl", "reverse-kl", "tv")
MAX_TEMPERATURE = 2.0
START = "folder of an EAGLE-3 head for this target to go on from (default: begin with the target's own weights)"


@dataclass(frozen=True)
class Alignment:
    """A kind of what drafts, and how it is trained."""

    about: str
    details: str
    out: str
    options: type[Any]
    """What it may be asked for; its numbers are flags."""
    add: Callable[[Parser], object]
    """Its other flags, beside those of all kinds."""
    run: Callable[[argparse.Namespace, dict[str, Any]], int]
    """Trains with such numbers, and reports."""

    @property
    def numbers(self) -> list[Field[Any]]:
        """Those of the options."""
        return [entry for entry in fields(self.options) if "about" in entry.metadata]


def add(parser: Parser) -> None:
    """Its flags."""
    named = "{" + ",".join(KINDS) + "}"
    kinds = parser.add_subparsers(dest="kind", title="what is trained", metavar=named, required=True)
    for name, kind in KINDS.items():
        about = f"{kind.about}\n\n{kind.details}"
        own = kinds.add_parser(name, help=kind.about, description=about, prog=f"paceline align {name}")
        _add_common(own.add_argument, kind)
        kind.add(own)


def _add_common(flag: Callable[..., object], kind: Alignment) -> None:
    flag("--target", required=True, metavar="MODEL", help="folder or hub id of the target")
    flag("--data", type=Path, required=True, nargs="+", metavar="PATH", help="files, or folders of them")
    flag("--out", type=Path, required=True, metavar="DIR", help=kind.out)
    for entry in kind.numbers:
        default, about = entry.default, entry.metadata["about"]
        text = about if "(default:" in about else f"{about} (default: {default})"
        metavar = "N" if isinstance(default, int) else "X"
        flag(flag_of(entry.name), type=type(default), default=default, metavar=metavar, help=text)
    flag("--device", default="auto", metavar="TEXT", help="auto, cpu or cuda (default: auto)")
    flag("--dtype", choices=DTYPES, default="auto", help="working precision; weights are fp32 (default: auto)")
    flag("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")
    about = "go on with what an earlier run left in --out, or delete that and start over (default: go on)"
    flag("--resume", action=argparse.BooleanOptionalAction, default=True, help=about)


def run(args: argparse.Namespace) -> int:
    """Train, and say what it brought."""
    kind = KINDS[args.kind]
    asked = {entry.name: getattr(args, entry.name) for entry in kind.numbers}
    for entry in kind.numbers:
        minimum, maximum = entry.metadata["minimum"], entry.metadata["maximum"]
        if not minimum <= asked[entry.name] <= maximum:
            bounds = f"from {minimum} to {maximum}"
            raise BadInput(f"{flag_of(entry.name)} must be {bounds}, got {asked[entry.name]}")
    cores = usable_cores()
    if not 1 <= args.threads <= cores:
        raise BadInput(f"--threads must be 1 to {cores}, the cores usable here, got {args.threads}")
    from alignment.options import AlignmentError, DataError, Interrupted, SettingsError
    from engine.model import ModelError

    try:
        return kind.run(args, asked)
    except (DataError, SettingsError, ModelError) as error:
        raise BadInput(str(error)) from error
    except Interrupted as error:
        raise CommandError(str(error), INTERRUPTED) from error
    except AlignmentError as error:
        raise CommandError(str(error)) from error


def _done_before(place: Workplace) -> Mapping[str, Any] | None:
    """The figures of a run of the same settings that came to its end in this folder, which is said."""
    if place.finished is not None:
        complain(f"paceline: --out {place.out}: done before with the same settings; --no-resume starts over")
    return place.finished


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Ask what this gives whether the user wants to stop; a second signal does not wait."""
    told = Event()

    def take(signaled: int, _frame: FrameType | None) -> None:
        told.set()
        signal.signal(signaled, signal.SIG_DFL)
        complain("paceline: stopping after this step, with a checkpoint; once more to stop at once")

    before = {one: signal.signal(one, take) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told.is_set
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


# -- a draft model -----------------------------------------------------------------------------------------------------


def _add_draft(parser: Parser) -> None:
    flag = parser.add_argument
    flag("--draft", required=True, metavar="MODEL", help="folder or hub id of the draft to begin with")
    about = "what is made small: a Kullback-Leibler divergence, or total variation, which is what acceptance loses"
    flag("--objective", choices=OBJECTIVES, default="forward-kl", help=f"{about} (default: forward-kl)")
    about = "of the target's samples; repeat, or separate by commas (default: 0,0.8,1)"
    flag("--temperature", action="append", metavar="X,Y", help=about)


def _align_draft(args: argparse.Namespace, asked: dict[str, Any]) -> int:
    temperatures = values(args, "temperature", "0,0.8,1", partial(number, maximum=MAX_TEMPERATURE))
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    from alignment.data import find_data
    from alignment.distillation import Distillation, DistillationOutcome
    from alignment.encoding import Encoder, tokenizer_of
    from alignment.pair import load_pair, settings_of
    from alignment.workplace import Workplace

    options = DistillationOptions(objective=args.objective, temperatures=temperatures, **asked)
    data = find_data(args.data)
    pair = load_pair(args.target, args.draft, args.dtype, args.device, args.threads)
    if not options.new_tokens + 1 < options.sequence <= pair.context:
        wanted = f"more than --new-tokens ({options.new_tokens}) and at most the context ({pair.context})"
        raise BadInput(f"--sequence must be {wanted}, got {options.sequence}")
    if options.batch_tokens < options.sequence:
        wanted = f"at least --sequence ({options.sequence})"
        raise BadInput(f"--batch-tokens must be {wanted}, got {options.batch_tokens}")
    settings = settings_of(options, data, target=pair.target, draft=pair.draft)
    place = Workplace(args.out, settings, resume=args.resume)
    if figures := _done_before(place):
        return _tell_draft(DistillationOutcome(**figures), args.out)
    encoder = Encoder(tokenizer_of(args.target))
    with _stopping() as stopped:
        outcome = Distillation(pair, encoder, options, place, stopped, complain).run(data)
    return _tell_draft(outcome, args.out)


def _tell_draft(outcome: DistillationOutcome, out: Path) -> int:
    from alignment.distillation import plot, table, verdict

    Console(highlight=False).print(table(outcome))
    drawn = plot(outcome, out)
    say(verdict(outcome, out))
    say(f"plot: {drawn}" if drawn else "no plot: matplotlib is not installed")
    return 0


# -- an EAGLE-3 head ---------------------------------------------------------------------------------------------------


def _align_eagle(args: argparse.Namespace, asked: dict[str, Any]) -> int:
    for name in ("layers", "vocabulary") if args.start else ():
        if asked[name] != getattr(EagleOptions(), name):
            raise BadInput(f"--{name} is that of the head that --start names: leave it out")
    from alignment.data import find_data
    from alignment.eagle.training import EagleTraining
    from alignment.encoding import Encoder, tokenizer_of
    from alignment.pair import load_stock, settings_of
    from alignment.workplace import Workplace

    options, data = EagleOptions(start=args.start, **asked), find_data(args.data)
    target = load_stock(args.target, args.dtype, args.device, args.threads)
    if not 2 * options.reach < args.sequence <= target.context:  # half of a short one is the prompt of what is measured
        wanted = f"more than twice the {options.reach} tokens that are guessed (--depth and one)"
        wanted += f", at most the context ({target.context})"
        raise BadInput(f"--sequence must be {wanted}, got {args.sequence}")
    place = Workplace(args.out, settings_of(options, data, target=target), resume=args.resume)
    figures = _done_before(place)
    if not figures:
        encoder = Encoder(tokenizer_of(args.target))
        with _stopping() as stopped:
            figures = EagleTraining(target, encoder, options, place, stopped, complain).run(data)
    _tell_head(figures)
    kept = f"step {figures['best_step']} of {figures['step']}"
    say(f"{args.out} holds the head of {kept}: paceline up --target ... --draft-eagle {args.out}")
    return 0


def _tell_head(figures: Mapping[str, Any]) -> None:
    before, after = figures["before"], figures["after"]
    table = Table(title="how often guesses are what the target says, on text held out")
    for column in ("guess", "before", "after"):
        table.add_column(column, justify="right")
    for ahead, (old, new) in enumerate(zip(before["by_head"], after["by_head"], strict=True), 1):
        table.add_row(f"+{ahead}", f"{old:.3f}", f"{new:.3f}")
    table.add_row("in a row", f"{before['run']:.3f}", f"{after['run']:.3f}")
    Console(highlight=False).print(table)


KINDS = {
    "draft": Alignment(
        "distil a draft model on the target's own samples",
        """\
The target continues prompts that are cut from the data; the draft learns the target's distributions on that, and on
the data itself. What is held out of the data is never trained on: acceptance there is measured on the way, the best
weights are kept, and training ends early when nothing gets better. A run that is stopped goes on when it is given
again. The defaults suit small models on a CPU; for a draft of a billion parameters on a GPU, begin with

  paceline align draft --target ./llama-8b --draft ./llama-1b --data ./texts ./recorded-prompts --out ./aligned \\
    --device cuda --dtype bf16 --steps 4000 --batch-tokens 16384 --sequence 2048 --samples 10000000

Data are UTF-8 text and JSON lines with "text", "prompt" (and "completion") or "messages", as `--record-prompts` writes
them.
""",
        "folder for the aligned draft",
        DistillationOptions,
        _add_draft,
        _align_draft,
    ),
    "eagle": Alignment(
        "train an EAGLE-3 head for a target",
        """\
The head reads hidden states of several layers of the target and guesses one token after another, from its own states.
It learns the target's own distributions on the text of the data, with as many of its guesses in a row as --depth says
(training-time test); the target stays as it is. What the target writes behind passages held out of the data says which
weights are best, and when to end. A run that is stopped goes on when it is given again. Hidden states are computed as
they are needed and kept nowhere. The folder has the published layout of EAGLE-3; serve it with

  paceline up --target ./llama-8b --draft-eagle ./llama-8b-eagle

The defaults suit small models on a CPU. Data are UTF-8 text and JSON lines with "text", "prompt" (and "completion") or
"messages"; text that the target wrote itself is best. For targets with large vocabularies, --vocabulary 32000 keeps
the output layer small.
""",
        "folder for the head",
        EagleOptions,
        lambda parser: parser.add_argument("--start", default="", metavar="DIR", help=START),
        _align_eagle,
    ),
}
