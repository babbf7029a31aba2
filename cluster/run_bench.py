"""``paceline bench``: the measurements, on this machine."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cluster import run_bench_serve
from cluster.console import CommandError, say
from cluster.flags import BAD_INPUT, FAILED, Parser
from cluster.folders import is_folder
from cluster.pools import DTYPES
from cluster.threads import usable_cores

ABOUT = "measure decoding speed on this machine, against other ways to decode, and what faults do to streams"
DETAILS = """\
Everything is measured side by side in one run, with models built from the bundled ones or of random weights; `serve`
measures servers that run already. Keep the machine quiet meanwhile.

  paceline bench engine --quick
  paceline bench speculation --quick --json figures.json
  paceline bench speculation
  paceline bench drafting --only medusa
  paceline bench gpu --json figures.json
  paceline bench http --quick
  paceline bench relay
  paceline bench serve --url http://127.0.0.1:8000 --against-plain
  paceline bench chaos --only kill-target
  paceline bench soak --minutes 2
"""
QUICK_PROMPTS, PROMPTS = 8, 10
QUICK_BURSTS, BURSTS = 2, 3
TOKENS = 8
"""Fewest new tokens a prompt; the first do not count."""
MOST_STREAMS = 32
"""More would be refused, which is a fault of its own."""
MOST_HTTP_STREAMS = 256
"""Each is a connection, and tokens of all come at a pace that one process must keep up with."""
MAX_RELAY_SESSIONS = 256
"""As many as a target runs in one step."""
MOST_TOKENS = 800
"""With a prompt, what the bundled model's context holds."""
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def add(parser: Parser) -> None:
    """Its flags."""
    benches = parser.add_subparsers(
        dest="bench",
        title="benchmarks",
        metavar="{engine,gpu,speculation,drafting,http,relay,serve,chaos,soak}",
        required=True,
    )
    _add_engine(benches)
    _add_gpu(benches)
    _add_speculation(benches)
    _add_drafting(benches)
    _add_http(benches)
    _add_relay(benches)
    run_bench_serve.add(benches)
    _add_chaos(benches)
    _add_soak(benches)


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    # What would only fail when all is measured is refused before anything is.
    _check_files(args)
    if args.out and getattr(args, "quick", False) and args.bench != "drafting":
        raise CommandError("--out belongs to a full run; with --quick, use --json", BAD_INPUT)
    prepare: Callable[[argparse.Namespace], Callable[[], int]] = args.prepare
    measure = prepare(args)
    try:
        return measure()
    except CommandError:
        raise
    except Exception as error:
        if not isinstance(error, _endings()):
            raise
        raise CommandError(f"the benchmark ended early: {error or 'a worker did not answer'}", FAILED) from error


def _check_files(args: argparse.Namespace) -> None:
    if args.json and not is_folder(args.json.absolute().parent):
        raise CommandError(f"--json {args.json}: no such folder", BAD_INPUT)
    if args.json and is_folder(args.json):
        raise CommandError(f"--json {args.json}: a folder, not a file", BAD_INPUT)
    if args.out:
        place = args.out.absolute()
        nearest = next(path for path in (place, *place.parents) if os.path.lexists(path))
        if not is_folder(nearest):
            raise CommandError(f"--out {args.out}: {nearest} is not a folder", BAD_INPUT)


def _endings() -> tuple[type[Exception], ...]:
    """What may end a benchmark early; imported only when something did."""
    from benchmarks.chaos.stage import StageError
    from benchmarks.http_client import BadAnswer
    from benchmarks.workers import WorkerFailed
    from router.generation import GenerationError

    return (WorkerFailed, StageError, BadAnswer, GenerationError, TimeoutError, ConnectionError)


def _add_engine(benches: argparse._SubParsersAction[Parser]) -> None:
    about = "the target worker's engine: its steps, its batches and its memory, and transformers"
    details = "The quick run takes about four minutes, the full one about ten"
    bench = benches.add_parser("engine", help=about, description=f"Measures {about}.\n\n{details}.")
    bench.set_defaults(prepare=_engine)
    flag = bench.add_argument
    flag("--quick", action="store_true", help="fewer rounds, no requests through a router; writes no folder")
    _add_files(bench, "DATE-engine")
    flag("--hidden", type=int, default=2048, metavar="N", help="hidden size of the model (default: 2048)")
    flag("--layers", type=int, default=4, metavar="N", help="layers of the model (default: 4)")
    flag("--threads", type=int, default=1, metavar="N", help="cores, and threads of a step (default: 1)")


def _add_gpu(benches: argparse._SubParsersAction[Parser]) -> None:
    about = "the engine on a GPU: its steps over the memory's pace, whether they are exact, prompts, and transformers"
    details = "Takes less than five minutes on an H100; needs torch, transformers and triton, and nothing that serves"
    bench = benches.add_parser("gpu", help=about, description=f"Measures {about}.\n\n{details}.")
    bench.set_defaults(prepare=_gpu, out=None)
    flag = bench.add_argument
    flag("--stage", action="append", default=[], metavar="NAME,...", help="only these stages (default: all)")
    flag("--shape", action="append", default=[], metavar="NAME,...", help="these models instead of each stage's own")
    flag("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the same on a tiny model, without kernels")
    about = "of all models' weights; needs torchao (default: none)"
    flag("--quantization", choices=("none", "int8", "fp8"), default="none", help=about)
    flag("--json", type=Path, metavar="FILE", help="write the figures there, after each stage")


def _add_speculation(benches: argparse._SubParsersAction[Parser]) -> None:
    about = "speculative against plain decoding, other ways to draft, and transformers"
    details = "The full run takes an hour or more, the quick one less than ten minutes; building the pairs adds minutes"
    bench = benches.add_parser("speculation", help=about, description=f"Measures {about}.\n\n{details} the first time.")
    bench.set_defaults(prepare=_speculation)
    flag = bench.add_argument
    flag("--quick", action="store_true", help="only the settings for which there are goals; writes no folder")
    _add_files(bench, "DATE")
    flag("--prompts", type=int, metavar="N", help=f"prompts a setting (default: {PROMPTS}; quick: {QUICK_PROMPTS})")
    bursts = f"rounds with several requests at once (default: {BURSTS}; quick: {QUICK_BURSTS})"
    flag("--bursts", type=int, metavar="N", help=bursts)
    flag("--tokens", type=int, default=96, metavar="N", help="new tokens a prompt (default: 96)")
    flag("--dtype", default="bfloat16", metavar="TEXT", help="number format (default: bfloat16)")
    flag("--hidden", type=int, default=1024, metavar="N", help="hidden size of the stretched target (default: 1024)")
    flag("--layers", type=int, default=24, metavar="N", help="layers of the stretched target (default: 24)")


def _add_drafting(benches: argparse._SubParsersAction[Parser]) -> None:
    about = "every way to draft without a small sibling, alignment, and what fit predicts"
    details = "The quick run takes about five minutes and leaves fit out, the full one about half an hour"
    bench = benches.add_parser("drafting", help=about, description=f"Measures {about}.\n\n{details}.")
    bench.set_defaults(prepare=_drafting, json=None)
    flag = bench.add_argument
    flag("--quick", action="store_true", help="few prompts; writes a folder only with --out")
    flag("--only", action="append", default=[], metavar="PART", help="only this part (may be given again)")
    flag("--out", type=Path, metavar="DIR", help="folder (default: benchmarks/results/DATE-drafting)")


def _add_http(benches: argparse._SubParsersAction[Parser]) -> None:
    about = "what the HTTP path adds to the first token and to the others, beside a bare server that streams"
    details = "No model is computed. The quick run takes about half a minute, the full one about five"
    bench = benches.add_parser("http", help=about, description=f"Measures {about}.\n\n{details}.")
    bench.set_defaults(prepare=_http)
    flag = bench.add_argument
    flag("--quick", action="store_true", help="fewer and shorter rounds; writes no folder")
    _add_files(bench, "DATE-http")
    flag("--streams", type=int, default=64, metavar="N", help="streams at once (default: 64)")
    flag("--rounds", type=int, metavar="N", help="turns of each server (default: 7; quick: 2)")


def _add_relay(benches: argparse._SubParsersAction[Parser]) -> None:
    about = "what the router's relay takes from target to drafter and back, beside bare gRPC streams"
    details = "No model is computed. Takes less than a minute"
    bench = benches.add_parser("relay", help=about, description=f"Measures {about}.\n\n{details}.")
    bench.set_defaults(prepare=_relay, out=None)
    flag = bench.add_argument
    flag("--json", type=Path, metavar="FILE", help="write the figures there too")
    flag("--sessions", type=int, default=16, metavar="N", help="sessions at once (default: 16)")
    flag("--steps", type=float, default=125.0, metavar="N", help="steps of the target a second (default: 125)")
    flag("--host-ms", type=float, default=1.0, metavar="MS", help="Python in each step of the target (default: 1)")
    flag("--rounds", type=int, default=3, metavar="N", help="turns of the router and of the bare relay (default: 3)")
    flag("--seconds", type=float, default=4.0, metavar="S", help="how long a turn is measured (default: 4)")


def _add_files(bench: Parser, folder: str) -> None:
    """Where figures go; ``folder``: the usual one of a full run, below the results."""
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    bench.add_argument(
        "--out", type=Path, metavar="DIR", help=f"folder of a full run (default: benchmarks/results/{folder})"
    )


def _add_chaos(benches: argparse._SubParsersAction[Parser]) -> None:
    about = "streams under faults: workers killed and hung, nodes removed, the pool replaced, too much load"
    details = "On a Ray cluster of pretend nodes on this machine. Takes about ten minutes; exit code 1 if a row fails"
    bench = benches.add_parser("chaos", help=about, description=f"Measures {about}.\n\n{details}.")
    bench.set_defaults(prepare=_chaos)
    flag = bench.add_argument
    flag("--list", action="store_true", help="name the faults, and do nothing")
    flag("--only", action="append", default=[], metavar="NAME", help="only this fault; may be given again")
    flag("--hang", type=float, default=30.0, metavar="S", help="seconds that a process is stopped for (default: 30)")
    flag("--overload", type=float, default=60.0, metavar="S", help="seconds of too much load (default: 60)")
    _add_faults(bench)


def _add_soak(benches: argparse._SubParsersAction[Parser]) -> None:
    about = "streams under random faults every few seconds, and what is left of them in the end"
    bench = benches.add_parser("soak", help=about, description=f"Measures {about}.\n\nOn the cluster of `chaos`.")
    bench.set_defaults(prepare=_soak)
    bench.add_argument("--minutes", type=float, default=30.0, metavar="N", help="for how long (default: 30)")
    _add_faults(bench)


def _add_faults(bench: Parser) -> None:
    """What both kinds of faults have in common."""
    flag = bench.add_argument
    flag("--streams", type=int, default=16, metavar="N", help="streams at once (default: 16)")
    flag("--tokens", type=int, default=200, metavar="N", help="new tokens of a request (default: 200)")
    flag(
        "--dtype", default="fp64", choices=DTYPES, help="number format (default: fp64, where rounding decides nothing)"
    )
    flag("--seed", type=int, default=0, metavar="N", help="of the choice of faults and victims (default: 0)")
    flag("--json", type=Path, metavar="FILE", help="write the figures there")
    flag(
        "--out", type=Path, metavar="DIR", help="write figures and a page there, such as benchmarks/results/DATE-chaos"
    )


def _engine(args: argparse.Namespace) -> Callable[[], int]:
    """Check its flags; return what measures."""
    from benchmarks.engine_settings import HIDDEN_MULTIPLE, Options, Shape

    if args.hidden < HIDDEN_MULTIPLE or args.hidden % HIDDEN_MULTIPLE:
        raise CommandError(f"--hidden must be a multiple of {HIDDEN_MULTIPLE}, got {args.hidden}", BAD_INPUT)
    if args.layers < 1:
        raise CommandError(f"--layers must be at least 1, got {args.layers}", BAD_INPUT)
    cores = usable_cores()
    if not 1 <= args.threads <= cores:
        raise CommandError(f"--threads must be 1 to {cores}, the cores usable here, got {args.threads}", BAD_INPUT)
    options = Options(
        quick=args.quick,
        json=args.json,
        out=args.out or RESULTS / f"{_today()}-engine",
        shape=Shape(args.hidden, args.layers),
        threads=args.threads,
    )
    from benchmarks import engine

    return partial(engine.main, options)


def _gpu(args: argparse.Namespace) -> Callable[[], int]:
    """Check its flags; return what measures."""
    from benchmarks.gpu_report import CPU_SHAPE, SHAPES, STAGES, Options

    stages = _named("--stage", args.stage, STAGES) or list(STAGES)
    shapes = _named("--shape", args.shape, SHAPES if args.device == "cuda" else [CPU_SHAPE])
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise CommandError(
            "this benchmark is for a GPU, and torch finds none here; --device cpu tries it on a tiny model", BAD_INPUT
        )
    from benchmarks import gpu

    command = shlex.join(["paceline", *sys.argv[1:]])
    return partial(gpu.main, Options(stages, shapes, args.device, args.json, command, args.quantization))


def _named(flag: str, given: Sequence[str], known: Iterable[str]) -> list[str]:
    """What a flag names, several separated by commas."""
    names = [name.strip() for one in given for name in one.split(",")]
    for name in names:
        if name not in known:
            raise CommandError(f"{flag} {name}: no such {flag[2:]}; there are {', '.join(known)}", BAD_INPUT)
    return names


def _speculation(args: argparse.Namespace) -> Callable[[], int]:
    """Check its flags; return what measures."""
    prompts, bursts = (QUICK_PROMPTS, QUICK_BURSTS) if args.quick else (PROMPTS, BURSTS)
    prompts = prompts if args.prompts is None else args.prompts
    bursts = bursts if args.bursts is None else args.bursts
    for name, value, least in (("--prompts", prompts, 1), ("--bursts", bursts, 1), ("--tokens", args.tokens, TOKENS)):
        if value < least:
            raise CommandError(f"{name} must be at least {least}, got {value}", BAD_INPUT)
    if not args.quick and not find_spec("matplotlib"):
        raise CommandError("a full run draws plots, for which matplotlib is needed: pip install matplotlib", BAD_INPUT)
    from benchmarks import speculation
    from benchmarks.settings import Options

    options = Options(
        quick=args.quick,
        json=args.json,
        out=args.out or RESULTS / _today(),
        prompts=prompts,
        bursts=bursts,
        tokens=args.tokens,
        dtype=args.dtype,
        hidden=args.hidden,
        layers=args.layers,
    )
    return partial(speculation.main, options)


def _drafting(args: argparse.Namespace) -> Callable[[], int]:
    """Check its flags; return what measures."""
    from benchmarks import drafting

    known = [part.name for part in drafting.PARTS]
    for name in args.only:
        if name not in known:
            raise CommandError(f"--only {name}: no such part; there are {', '.join(known)}", BAD_INPUT)

    def measure() -> int:
        with tempfile.TemporaryDirectory() as folder:
            out = args.out or (Path(folder) if args.quick else RESULTS / f"{_today()}-drafting")
            try:
                return drafting.main(drafting.Options(out, tuple(args.only), args.quick))
            except drafting.PartFailed as error:
                raise CommandError(str(error), FAILED) from error

    return measure


def _http(args: argparse.Namespace) -> Callable[[], int]:
    """Check its flags; return what measures."""
    if not 1 <= args.streams <= MOST_HTTP_STREAMS:
        raise CommandError(f"--streams must be 1 to {MOST_HTTP_STREAMS}, got {args.streams}", BAD_INPUT)
    if args.rounds is not None and args.rounds < 1:
        raise CommandError(f"--rounds must be at least 1, got {args.rounds}", BAD_INPUT)
    from benchmarks import http_path
    from benchmarks.http_settings import Options

    options = Options(
        quick=args.quick,
        json=args.json,
        out=args.out or RESULTS / f"{_today()}-http",
        streams=args.streams,
        rounds=args.rounds,
    )
    return partial(http_path.main, options)


def _relay(args: argparse.Namespace) -> Callable[[], int]:
    """Check its flags; return what measures."""
    bounds = (("sessions", 1, MAX_RELAY_SESSIONS), ("steps", 1, 1000), ("rounds", 1, 100), ("seconds", 0.1, 600))
    for name, least, most in bounds:
        if not least <= getattr(args, name) <= most:
            raise CommandError(f"--{name} must be {least} to {most}, got {getattr(args, name):g}", BAD_INPUT)
    if not 0 <= args.host_ms <= 1000 / args.steps:
        raise CommandError(f"--host-ms must be 0 to {1000 / args.steps:g}, a step, got {args.host_ms:g}", BAD_INPUT)
    from benchmarks import relay
    from benchmarks.relay_settings import Options

    options = Options(args.json, args.sessions, args.steps, args.host_ms, args.rounds, args.seconds)
    return partial(relay.main, options)


def _chaos(args: argparse.Namespace) -> Callable[[], int]:
    """Check its flags; return what measures."""
    _check_faults(args, "hang", "overload")
    from benchmarks.chaos import main, scenarios
    from benchmarks.chaos.settings import Options

    options = Options(hang=args.hang, overload=args.overload, only=tuple(args.only), **_faults(args, "chaos"))
    known = {scenario.name: scenario.fault for scenario in scenarios.scenarios(options)}
    for name in args.only:
        if name not in known:
            raise CommandError(f"--only {name}: no such fault; there are {', '.join(known)}", BAD_INPUT)
    if args.list:
        return partial(_list, known)
    return partial(main.chaos, options)


def _soak(args: argparse.Namespace) -> Callable[[], int]:
    """Check its flags; return what measures."""
    _check_faults(args, "minutes")
    from benchmarks.chaos import main
    from benchmarks.chaos.settings import Options

    return partial(main.random_faults, Options(minutes=args.minutes, **_faults(args, "soak")))


def _list(known: dict[str, str]) -> int:
    for name, fault in known.items():
        say(f"{name:16} {fault}")
    return 0


def _check_faults(args: argparse.Namespace, *lengths: str) -> None:
    for name in lengths:
        if not 0 < getattr(args, name) < float("inf"):
            raise CommandError(f"--{name} must be above 0, got {getattr(args, name):g}", BAD_INPUT)
    for name, least, most in (("streams", 1, MOST_STREAMS), ("tokens", TOKENS, MOST_TOKENS)):
        if not least <= getattr(args, name) <= most:
            raise CommandError(f"--{name} must be {least} to {most}, got {getattr(args, name)}", BAD_INPUT)
    if not find_spec("psutil"):
        raise CommandError("faults are injected by means of psutil: pip install psutil", BAD_INPUT)


def _faults(args: argparse.Namespace, bench: str) -> dict[str, Any]:
    """The options that both kinds of faults have."""
    given = {name: getattr(args, name) for name in ("streams", "tokens", "dtype", "seed", "json", "out")}
    return {
        "command": shlex.join(["paceline", *sys.argv[1:]]) if len(sys.argv) > 1 else f"paceline bench {bench}"
    } | given


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
