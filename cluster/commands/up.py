"""``paceline up``: everything at once, on this machine or on a Ray cluster, until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.config import flags
from cluster.config.checks import check
from cluster.config.config import Config, max_replicas_of, min_replicas_of
from cluster.config.security import own_api_key
from cluster.console import BadInput, CommandError, complain, stages, tell
from cluster.local import gpus, threads
from cluster.local.stretched import ABOUT as STRETCHED
from cluster.local.stretched import stretched
from transport.address import is_loopback, join

if TYPE_CHECKING:  # the one brings Ray
    from cluster.local.backend import LocalProcesses
    from cluster.ray.cluster import RayCluster

ABOUT = "serve: start router, target and draft workers, and keep them running"
DETAILS = """\
Runs the Ray Serve application, with Ray on this machine by default; --backend local runs plain processes
instead. The bundled model pair is served unless you name others; a draft with the target's tokenizer is best.

  paceline up
  paceline up --target ./llama-8b --draft ./llama-1b --dtype bf16
  paceline up --target-replicas 2 --draft-replicas 2 --router-replicas 2
  paceline up --target ./llama-8b --no-speculation
  paceline up --config paceline.yaml --port 8001
  paceline up --config paceline.yaml --address auto --detach     on a Ray cluster, to stay; again to change it
  paceline up --stretched --demo         the bundled target at the cost of a larger model, and what drafting gains
"""
DEMO_PROMPT = "def fib(n):"
ANYWHERE = ("0.0.0.0", "::")
HTTP_SECONDS = 60.0
"""How long the HTTP address may take to answer once all workers are ready."""


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    flags.add_setting(parser, "--target", "target.model", about="target model: folder or hub id")
    about = "draft model: folder or hub id, best with the target's tokenizer"
    flags.add_setting(parser, "--draft", "draft.model", about=about)
    flags.add_setting(parser, "--draft-placement", "draft.placement")
    flags.add_setting(parser, "--draft-eagle", "target.eagle")
    flags.add_setting(parser, "--eagle-at", "target.eagle_at")
    flags.add_setting(parser, "--dtype", "target.dtype", "draft.dtype")
    flags.add_setting(parser, "--device", "target.device", "draft.device")
    flags.add_setting(parser, "--quantization", "target.quantization")
    flags.add_setting(parser, "--draft-quantization", "draft.quantization")
    flags.add_setting(parser, "--threads", "target.threads", "draft.threads")
    flags.add_setting(parser, "--tensor-parallel-size", "target.tensor_parallel_size")
    flags.add_setting(parser, "--draft-tensor-parallel-size", "draft.tensor_parallel_size")
    flags.add_speculative_config(parser)
    flags.add_setting(parser, "--no-speculation", "speculation.enabled", about="plain decoding, no draft workers")
    flags.add_setting(parser, "--host", "router.host")
    flags.add_setting(parser, "--port", "router.port")
    flags.add_setting(parser, "--allow-remote", "router.allow_remote")
    flags.add_setting(parser, "--model-name", "router.model_name")
    flags.add_setting(parser, "--record-prompts", "router.record_prompts")
    flags.add_section(parser, "security")
    flags.add_section(parser, "admission", without=("cors_origins",))
    flags.add_repeated(parser, "--cors-origin", "admission.cors_origins")
    flags.add_tracing(parser)
    for role in ("target", "draft", "router"):
        flags.add_setting(parser, f"--{role}-replicas", f"{role}.replicas")
    flags.add_setting(parser, "--target-standby", "target.standby")
    flags.add_setting(parser, "--backend", "backend")
    flags.add_setting(parser, "--address", "ray.address")
    about = "serve the bundled target at the cost of a larger model, same text"
    parser.add_argument("--stretched", action="store_true", help=about)
    parser.add_argument("--demo", action="store_true", help="stream one completion, with its speed-up, when ready")
    about = "on a running cluster: return when it serves, and leave it serving"
    parser.add_argument("--detach", action="store_true", help=about)
    flags.add_file(parser)


def run(args: argparse.Namespace) -> int:
    """Start, say how to use it, and keep it running."""
    config = flags.configuration(args)
    if args.stretched:
        with stages() as report:
            config = stretched(config, report)
    named = any(override.key == "ray.address" for override in flags.overrides_in(args))
    if named and config.backend == "local" and config.ray.address != "local":
        raise BadInput(
            f"--address {config.ray.address} is a Ray cluster, which --backend local does without; leave one"
        )
    if args.detach and config.on_this_machine:
        raise BadInput("--detach leaves the application on a running Ray cluster: name it by --address")
    check(config)
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT as well: in the background it starts out ignored
        signal.signal(number, signal.default_int_handler)
    config = gpus.settled(threads.settled(config))
    backend = _backend(config, detach=args.detach)
    try:
        with stages() as report:
            backend.start(report)
            report("waiting for HTTP to answer", "router")
            config, only = _await_http(config)
        _introduce(config, only)
        if args.stretched:
            tell(f"The bundled target is stretched to the cost of {STRETCHED}; what it says is unchanged.")
        if args.demo:
            _demo(config)
        _say_how_to_use(config, args.detach, only)
        backend.watch()
    except KeyboardInterrupt:
        pass
    except CommandError as error:
        complain(f"paceline: {error}")  # before stopping, which takes seconds
        return error.code
    finally:
        # Stopping is not interrupted: a second Ctrl-C must not leave orphans.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with stages() as report:
            report("leaving" if args.detach else "stopping")
            backend.stop()
    return 0


def _backend(config: Config, *, detach: bool) -> LocalProcesses | RayCluster:
    if config.backend == "ray":
        from cluster.ray.cluster import RayCluster

        return RayCluster(config, detach=detach)
    from cluster.local.backend import LocalProcesses

    return LocalProcesses(config)


def _url(config: Config) -> str:
    host = config.router.host
    return f"http://{join('127.0.0.1' if host in ANYWHERE else host, config.router.port)}"


def _await_http(config: Config) -> tuple[Config, str]:
    """Until the API says which model it serves. With the host to ask, where this node has no HTTP.

    Also the node on whose loopback alone HTTP is, if that is another; nobody can ask there from here.
    """
    import httpx

    from cluster.completion import bearer

    headers = bearer(own_api_key(config))
    deadline, last = time.monotonic() + HTTP_SECONDS, "no answer"
    with httpx.Client(trust_env=False, timeout=5.0, headers=headers) as client:
        while time.monotonic() < deadline:
            try:
                answer = client.get(f"{_url(config)}/v1/models")
                if answer.is_success and answer.json()["data"]:
                    return config, ""
                last = f"status {answer.status_code}: {answer.text[:200]}"
            except httpx.TransportError as error:
                last = str(error)
            if other := _elsewhere(config):
                if is_loopback(config.router.host):
                    return config, other
                config = replace(config, router=replace(config.router, host=other))
            time.sleep(0.1)
    raise CommandError(f"{_url(config)} does not serve within {HTTP_SECONDS:.0f} s ({last})")


def _elsewhere(config: Config) -> str:
    """The node of a Ray cluster that is to be asked, if it is not this one; also empty where the settings name it."""
    host = config.router.host
    if config.on_this_machine or not (host in ANYWHERE or is_loopback(host)):
        return ""
    from cluster.ray.cluster import http_elsewhere

    return http_elsewhere()


def _introduce(config: Config, only: str) -> None:
    """``only``: the node on whose loopback HTTP is, if that is another."""
    tell(f"Paceline serves at {_url(config)}" + (f" on {only}; this node has no replica, so no HTTP" if only else ""))
    pools = []
    for pool in config.nonempty_pools():
        fewest, largest = min_replicas_of(pool.settings), max_replicas_of(pool.settings)
        size = f"{fewest}" if fewest == largest else f"{fewest} to {largest}"
        pools.append(f"{size} x {pool} {pool.settings.model}")
    shared = [draft.model for pool in config.pools() if (draft := config.shared_draft(pool))]
    drafts = f", drafting in turn with {', '.join(shared)}" if shared else "" if config.drafts else ", no drafts"
    tell(f"  {', '.join(pools)}{drafts}, on {config.backend}")


def _named(config: Config) -> str:
    """The model to ask; empty where there is only one, which need not be named."""
    return next(iter(config.models)) if len(config.models) > 1 else ""


def _say_how_to_use(config: Config, detached: bool, only: str = "") -> None:
    """The page's address comes last, where it is still in sight."""
    url = _url(config)
    named = _named(config)
    other = (f" --model {named}" if named else "") + ("" if url == "http://127.0.0.1:8000" else f" --url {url}")
    tell(f"\nTry, {f'on {only}' if only else 'in another terminal'}:")
    tell(f'  paceline complete "{DEMO_PROMPT}"{other}')
    data = json.dumps(({"model": named} if named else {}) | {"prompt": DEMO_PROMPT, "max_tokens": 64})
    key = ' -H "authorization: Bearer $OPENAI_API_KEY"' if config.security.api_keys else ""
    tell(f"  curl {url}/v1/completions -H 'content-type: application/json'{key} -d '{data}'")
    if key:
        tell(f"Both take one of the API keys in {config.security.api_keys} from the variable OPENAI_API_KEY.")
    removal = f"It is left running; start again to change it, `paceline down --address {config.ray.address}` ends it."
    tell(f"\n{removal if detached else 'Ctrl-C stops it.'} In a browser, with every draft in sight: {url}")


def _demo(config: Config) -> None:
    from cluster.commands.complete import show
    from cluster.completion import CompletionRequest

    tell(f"\nA completion of {DEMO_PROMPT!r}:")
    try:
        key, model = own_api_key(config), _named(config)
        request = CompletionRequest(DEMO_PROMPT, max_tokens=96, temperature=0.0, seed=0, api_key=key, model=model)
        show(_url(config), request, compare=True)
    except (CommandError, OSError) as error:
        complain(f"paceline: the demo failed: {error}")
