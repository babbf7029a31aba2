"""``paceline doctor``: checks an installation and says what to fix."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from cluster.commands.simulate import MADE_UP
from cluster.config import environment
from cluster.config.config import Config, from_mapping
from cluster.config.flags import Parser, add_file, add_setting, configuration, flag_of, overrides_in
from cluster.config.security import identity, own_api_key
from cluster.config.settings import ConfigError
from cluster.console import FAILED, BadInput, say, stages
from cluster.discovery import addresses_in
from cluster.doctor.finding import Finding, Level, ok, problem
from speculation.events import Role

ABOUT = "check an installation and say what to fix"
DETAILS = """\
Without arguments: this machine and the configured models. With addresses also what runs there. One line for each
finding: ok, warning or problem, and what to do. Exit code 1 if there is a problem.

  paceline doctor
  paceline doctor --config paceline.yaml --address auto
  paceline doctor --address auto                           with the configuration that a RayService runs with
  paceline doctor --target 10.0.0.5:7001 --draft 10.0.0.6:7002 --target-step-ms 30
  paceline doctor --url http://127.0.0.1:8000
"""
Check = Callable[[], Iterable[Finding]]


def add(parser: Parser) -> None:
    """Its flags."""
    for role in ("target", "draft"):
        about = f"a running {role} worker (may be repeated)"
        parser.add_argument(f"--{role}", action="append", default=[], metavar="HOST:PORT", help=about)
    parser.add_argument("--workers", type=Path, metavar="FILE", help="a list of workers, as `paceline router` takes it")
    parser.add_argument(
        "--url", metavar="URL", help="where Paceline serves HTTP; two short completions of each model are run"
    )
    about = "sent there (default: the variable OPENAI_API_KEY, else the first key of security.api_keys)"
    parser.add_argument("--api-key", metavar="KEY", help=about)
    about = "local: this machine, without Ray; auto or HOST:PORT: also the running Ray cluster there"
    add_setting(parser, "--address", "ray.address", about=about)
    distance = parser.add_argument_group("whether drafting pays at the measured distance")
    about = f"{MADE_UP['target_step_ms'][-1]}; without it nothing is said"
    distance.add_argument("--target-step-ms", type=float, metavar="X", help=about)
    for name in ("draft_step_ms", "acceptance"):
        usual, _, _, what = MADE_UP[name]
        about = f"{what} (default: {usual:g})"
        distance.add_argument(flag_of(name), type=float, default=usual, metavar="X", help=about)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_file(parser)


def run(args: argparse.Namespace) -> int:
    """Check, report, and say by the exit code whether there is a problem."""
    for name in ("target_step_ms", "draft_step_ms", "acceptance"):
        value, maximum = getattr(args, name), MADE_UP[name][2]
        if value is not None and not 0 < value <= maximum:
            raise BadInput(f"{flag_of(name)} {value:g}: must be above 0 and at most {maximum:g}")
    listed = addresses_in(args)
    found = list(_findings(args, listed))
    if args.json:
        say(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        for finding in found:
            say(str(finding))
        counts = Counter(finding.level for finding in found)
        say(", ".join(f"{counts[level]} {level.value}" for level in Level))
    return FAILED if any(finding.level is Level.PROBLEM for finding in found) else 0


def _findings(args: argparse.Namespace, listed: dict[Role, list[str]]) -> Iterator[Finding]:
    from cluster.doctor import versions

    with stages() as report:
        report("looking at versions")
        yield from _guarded("versions", versions.check)
        try:
            config, source = _configuration(args)
        except ConfigError as error:
            yield problem("configuration", str(error), "correct it; `paceline config` prints every setting")
            return
        yield ok("configuration", source)
        for name, check in _checks(args, config, listed):
            report(f"looking at {name}")
            yield from _guarded(name, check)


def _configuration(args: argparse.Namespace) -> tuple[Config, str]:
    """What is to be checked, and where it stands: without a file, what is deployed where ``--address`` says."""
    config = configuration(args)
    if args.config is None and not config.on_this_machine:
        from cluster.doctor import ray_nodes
        from cluster.ray.parts import with_replicas

        deployed = ray_nodes.deployed(config)
        if deployed is not None:
            (settings, counts), source = deployed, f"as deployed at {config.ray.address}, and flags"
            return with_replicas(from_mapping(settings, "deployed", overrides=overrides_in(args)), counts), source
    return config, str(args.config) if args.config else "the defaults, and flags"


def _checks(args: argparse.Namespace, config: Config, listed: dict[Role, list[str]]) -> Iterator[tuple[str, Check]]:
    """What there is to check, in order; ``listed`` gets the workers that Ray knows."""
    from cluster.doctor import certificates, endpoint, machine, models, ray_nodes

    folders = [Path(path) for pool in config.pools() for _, path in config.loaded(pool)]
    elsewhere = not (config.on_this_machine or all(folder.is_dir() for folder in folders if folder.is_absolute()))
    if not elsewhere:
        yield "models", lambda: models.check(config)
    if (security := config.security).certificate:
        files = security.certificate, security.key, security.authority
        yield "certificates", lambda: certificates.check_all(*files)
    if config.on_this_machine and not (any(listed.values()) or args.url):
        yield "devices", lambda: machine.check_devices(config)
        yield "this machine", lambda: machine.check_machine(config)
    if not config.on_this_machine:
        yield f"Ray at {config.ray.address}", lambda: ray_nodes.check(config, listed, models=elsewhere)
    yield "workers", lambda: _workers(args, config, listed)
    if args.url:  # with the key of the flag, else as other clients have it, else where the configuration says

        def check() -> Iterator[Finding]:
            key = environment.api_key() or own_api_key(config) if args.api_key is None else str(args.api_key)
            return endpoint.check(args.url, key)

        yield args.url, check


def _workers(args: argparse.Namespace, config: Config, listed: dict[Role, list[str]]) -> Iterator[Finding]:
    from cluster.doctor import workers

    met = asyncio.run(workers.meet_all(listed, identity(config, "router") if any(listed.values()) else None))
    yield from workers.judge(met)
    if args.target_step_ms is not None:
        steps = args.target_step_ms / 1000, args.draft_step_ms / 1000
        yield from workers.judge_distance(met, *steps, args.acceptance)


def _guarded(name: str, check: Check) -> Iterator[Finding]:
    """A check that fails in a way nobody foresaw is a finding as well, and ends no other."""
    try:
        yield from check()
    except Exception as error:  # whatever it was, the other checks may still tell why
        reason = next(iter(str(error).strip().splitlines()), "")
        yield problem(name, f"cannot be checked: {type(error).__name__}: {reason}", "report this, with the line")
