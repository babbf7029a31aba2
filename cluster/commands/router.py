"""``paceline router``: one router in this process, for workers at fixed addresses."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from cluster.config import flags
from cluster.config.checks import check_tokenizer
from cluster.config.config import Config
from cluster.config.security import check_http_exposure, check_security
from cluster.config.serving import router_settings
from cluster.console import BadInput, CommandError, stages, tell
from cluster.discovery import FileDirectory, StaticDirectory, WorkerListError, addresses_in
from cluster.processes.logs import add_flags, set_up
from cluster.processes.starting import READY, STOPPING, notify
from speculation.events import Role
from transport.address import check_free, join

ABOUT = "run one router: the HTTP address in front of workers"
DETAILS = """\
Serves the OpenAI-compatible API. Workers may come and go; the router keeps trying to reach them, also where none
is there at first: requests then get status 503. The tokenizer is that of the bundled model, or of target.model in
--config, unless --tokenizer names another.

  paceline router --target 127.0.0.1:7001 --draft 127.0.0.1:7002 --tokenizer ./llama-8b --port 8000
  paceline router --workers workers.txt       lines such as "draft 10.0.0.6:7002"; read again when it changes
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    for role in Role:
        about = f"a {role} worker (may be repeated)"
        parser.add_argument(f"--{role}", action="append", default=[], metavar="HOST:PORT", help=about)
    parser.add_argument("--workers", type=Path, metavar="FILE", help="a list of workers instead; may change meanwhile")
    flags.add_section(parser, "router", without=("replicas", "min_replicas", "max_replicas", "labels"))
    flags.add_section(parser, "security")
    flags.add_speculative_config(parser)
    flags.add_section(parser, "admission", without=("cors_origins",))
    flags.add_repeated(parser, "--cors-origin", "admission.cors_origins")
    flags.add_tracing(parser)
    flags.add_file(parser)
    add_flags(parser)
    parser.add_argument(flags.AFTER_INPUT, action="store_true", help="connect to workers once standard input has ended")


def run(args: argparse.Namespace) -> int:
    """Serve until stopped."""
    set_up(args)
    from router.http.exhaustion import raise_limit

    raise_limit()
    config = flags.configuration(args)
    check_http_exposure(config)
    check_security(config, ("router",))
    check_free(join(config.router.host, config.router.port))
    directory = _directory(args)
    if config.router.tokenizer:
        check_tokenizer(config.router.tokenizer)
    if args.after_input:
        importlib.import_module("router.service")  # most of a start, and workers take longer
        sys.stdin.buffer.read()
    return asyncio.run(_serve(config, directory, awaited=args.after_input))


def _directory(args: argparse.Namespace) -> StaticDirectory:
    """Where the router learns its workers from; raises AddressError, CommandError."""
    if args.workers is not None:
        if args.target or args.draft:
            raise BadInput("give either --workers or --target and --draft")
        try:
            return FileDirectory(args.workers)
        except WorkerListError as error:
            raise BadInput(f"--workers {error}") from error
    if not args.target:
        raise BadInput("give --target HOST:PORT, at least once, or --workers FILE")
    return StaticDirectory(addresses_in(args))


async def _serve(config: Config, directory: StaticDirectory, *, awaited: bool = False) -> int:
    """Until told to stop. ``awaited``: workers of all the models configured are to come; those by hand are of none."""
    from router.service import Router, RouterError, freeze_loaded

    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    targets, drafts = (tuple(directory.workers[role]) for role in (Role.TARGET, Role.DRAFT))
    settings = router_settings(config, targets=targets, drafts=drafts)
    router = Router(settings if awaited else replace(settings, limits=replace(settings.limits, models=())))
    starting = asyncio.create_task(router.start())
    stop = asyncio.create_task(stopped.wait())
    try:
        with stages() as report:
            report(f"waiting for a target worker at {', '.join(targets)}")
            await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            freeze_loaded()
            directory.start(router.dispatcher.pool.set_workers)
            models = router.dispatcher.models.values()
            named = config.router.model_name if len(models) == 1 else ""
            served = ", ".join(f"model {named or model.name}, context {model.context}" for model in models)
            tell(f"router ready on {router.address} ({served or 'no target worker yet'})")
            notify(READY)
            await stop
    except RouterError as error:
        raise CommandError(str(error)) from error
    finally:
        notify(STOPPING)
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one does not wait for running requests
            loop.add_signal_handler(number, os._exit, 128 + number)
        starting.cancel()
        stop.cancel()
        await router.stop()
        directory.close()
    return 0
