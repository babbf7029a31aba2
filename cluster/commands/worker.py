"""``paceline worker``: one worker in this process, until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import os
import signal
from typing import TYPE_CHECKING

from cluster.config import checks, flags
from cluster.config.config import Config
from cluster.config.pools import LOADED, SHARED, Pool, TargetConfig
from cluster.config.security import check_security, identity
from cluster.config.serving import start_worker, worker_config
from cluster.config.settings import DEFAULT_POOL
from cluster.console import FAILED, BadInput, CommandError, complain, stages, tell
from cluster.processes.imports import import_worker, on_own_gpu
from cluster.processes.logs import add_flags, set_up
from cluster.processes.rank_processes import RankProcesses
from cluster.processes.starting import READY, STOPPING, notify
from speculation.events import Role

if TYPE_CHECKING:
    from transport.worker import Worker

ABOUT = "run one target or draft worker in this process"
DETAILS = """\
Loads a model and listens for routers. Says where it listens, and when it is ready. SIGTERM or Ctrl-C let its
sessions move or end, for up to drain_timeout seconds, and stop it; a second one stops it at once.

  paceline worker target --model ./llama-8b --listen 127.0.0.1:7001
  paceline worker target --model ./llama-8b --draft-model ./llama-1b      both in one process, in turn
  paceline worker draft --model ./llama-1b --listen 127.0.0.1:7002 --threads 2
  paceline worker draft --model ./qwen-0.5b --target-tokenizer ./llama-8b
  paceline worker draft --model ./llama-8b --draft-eagle ./eagle3     a head, for targets with --eagle-at drafter
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_SECONDS = 30.0
"""In which a worker ends that has drained."""
STDERR = 2
LISTEN = {"target": "127.0.0.1:7001", "draft": "127.0.0.1:7002"}
REPLICAS = ("replicas", "min_replicas", "max_replicas")
ELSEWHERE = (*REPLICAS, "standby", "gpus", "gpu_class", "labels", "sources", "placement", "eagle")
"""Settings that are no flags here, or others."""
NAMED = {name: flags.flag_of(name) for name in LOADED} | {"eagle": "--draft-eagle", "shared": "--draft-model"}
"""What messages call the settings that are checked."""


def add(parser: flags.Parser) -> None:
    """Its flags."""
    roles = parser.add_subparsers(dest="role", title="roles", metavar="{target,draft}", required=True)
    for role, about in (("target", "runs the served model"), ("draft", "runs a small model ahead of it")):
        worker = roles.add_parser(role, help=about, description=f"A {role} worker: {about}.")
        about = f"default: {LISTEN[role]}; port 0: any free one"
        worker.add_argument("--listen", default=LISTEN[role], metavar="HOST:PORT", help=about)
        flags.add_section(worker, role, without=ELSEWHERE)
        flags.add_setting(worker, "--allow-remote", "router.allow_remote")
        flags.add_section(worker, "security", without=("api_keys",))
        if role == "target":
            flags.add_setting(worker, "--draft-eagle", "target.eagle")
            flags.add_setting(worker, "--max-draft", "speculation.max_draft")
            flags.add_repeated(worker, "--source", "target.sources")
            flags.add_shared_draft(worker, "--draft-model")
        else:
            flags.add_setting(worker, "--draft-eagle", "draft.eagle")
            flags.add_setting(worker, "--lead", "speculation.lead")
        flags.add_tracing(worker)
        flags.add_file(worker)
        add_flags(worker)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped."""
    set_up(args)
    config = _translating(flags.configuration(args), args.role)
    if config.models and all(override.key != f"{args.role}.model" for override in flags.overrides_in(args)):
        raise BadInput(
            f"{args.config} lists models, and a worker by hand belongs to no pool of theirs; say by --model which to "
            f"load, and what else differs by flags or in the section {args.role}"
        )
    checks.check_listen(args.listen, config)
    check_security(config, (args.role,))
    shared = args.role == "target" and config.draft.placement == SHARED and config.drafts_with_models
    settings = config.target if args.role == "target" else config.draft
    checks.check_loaded(settings, config.draft if shared else None, NAMED)
    role = Role(args.role)
    return asyncio.run(_serve(role, on_own_gpu(config, role), args.listen))


def _translating(config: Config, role: str) -> Config:
    """The same for a draft worker that has to translate, where it is known whom it drafts for.

    Of the bundled target nobody has said so.
    """
    if role == "target" or config.models or config.target.model == TargetConfig().model:
        return config
    return worker_config(config, Pool(Role.DRAFT, "", DEFAULT_POOL, config.draft))


async def _serve(role: Role, config: Config, listen: str) -> int:
    """Load, say so, and wait for the end; a signal during loading ends the process at once."""
    loop = asyncio.get_running_loop()
    _let_signals_end()  # nothing is at stake yet
    worker = await _start(role, config, listen)
    worker.freeze_loaded()
    serving = asyncio.create_task(worker.wait())
    for number in SIGNALS:
        loop.add_signal_handler(number, serving.cancel)
    settings = config.target if role is Role.TARGET else config.draft
    tell(f"{role} worker ready on {worker.address} ({settings.model}, {worker.welcome.dtype})")
    notify(READY)
    await asyncio.wait({serving})
    notify(STOPPING)
    for number in SIGNALS:
        loop.remove_signal_handler(number)
    _let_signals_end()
    error = None if serving.cancelled() else serving.exception()
    patience = 0.0 if error else config.drain_timeout
    # What is stuck is not waited for, be it the loop, a rank or the interpreter's end.
    faulthandler.dump_traceback_later(patience + STOP_SECONDS, exit=True, file=STDERR)
    if error:
        complain(f"paceline: the {role} worker failed: {type(error).__name__}: {error}")
        await worker.stop()
        return FAILED
    await worker.drain(config.drain_timeout)
    return 0


def _let_signals_end() -> None:
    """From now on they end the process at once, and by the kernel: imports and collectives hold up every handler."""
    for number in SIGNALS:
        # But the kernel spares the first process of a container.
        signal.signal(number, signal.SIG_DFL if os.getpid() != 1 else lambda given, _: os._exit(128 + given))


async def _start(role: Role, config: Config, listen: str) -> Worker:
    with stages() as report:
        report("starting PyTorch")
        import_worker(config, role)
        from engine.model import ModelError
        from engine.parallel.group import RankError
        from engine.recorder import RecordError
        from speculation.sources.registry import SourceError
        from transport.worker import Door

        door = await Door.open(role.value, listen, identity(config, role.value))
        tell(f"{role} worker loading on {door.server.address}")
        try:
            return await start_worker(config, role, door, RankProcesses(), lambda loading: report(loading.doing))
        except (ModelError, RecordError, SourceError) as error:
            raise BadInput(str(error)) from error
        except RankError as error:
            raise CommandError(str(error)) from error
