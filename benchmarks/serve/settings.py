"""What a run of ``paceline bench serve`` is: who takes part, what is sent, how, and how long; and its flags."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

from benchmarks.harness.options import Options, between, flag
from cluster.config.environment import current
from cluster.console import BadInput

Json = dict[str, Any]
PACELINE, VLLM, OTHER = "Paceline", "vLLM", "not known"
"""Makes of servers; the first two are asked for more than others."""
BUNDLED_PROMPTS = "bundled"
DEFAULT_URL = "http://127.0.0.1:8000"
MOST_CONTENDERS = 16
PLAIN_SUFFIX = " plain"
"""What is added to the name of a contender whose speculation is off."""


DETAILS = """\
Sends the same requests to each --url in turn, round by round. Give several, or --against-plain for Paceline beside
itself without drafts. Whatever fails is counted by kind; latencies at a --rate count from when a request was due.

  paceline bench serve --url http://127.0.0.1:8000 --against-plain
  paceline bench serve --url ours=http://127.0.0.1:8000 --url vllm=http://127.0.0.1:8001 --rate 4 --requests 240
  paceline bench serve --url ours=http://127.0.0.1:8000 --url hf=http://127.0.0.1:8002 --model hf=./llama-8b
  paceline bench serve --url http://127.0.0.1:8000 --concurrency 8 --out results
  paceline bench serve --url d3=http://127.0.0.1:8000 --url d7=http://127.0.0.1:8000 \\
    --extra-body 'd3={"speculation": {"max_depth": 3}}' --extra-body 'd7={"speculation": {"max_depth": 7}}'
"""


@dataclass(frozen=True, slots=True)
class ServerContender:
    """A server, and how it is asked."""

    name: str
    url: str
    """Without the path ``/v1`` and a slash at the end."""
    model: str = ""
    """Empty: the only one that the server has, until that is known."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields over those of the body; None takes a field away."""
    api_key: str = field(default="", repr=False)
    plain: bool = False
    """Speculation is switched off, request by request; Paceline only."""
    process: int | None = None
    """A process of the server's; its process group stands still while others have their turn."""
    make: str = OTHER
    """By what the server says of itself; what it offers depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(Options):
    """One run."""

    BENCH = "serve"
    ABOUT = "load on running servers with OpenAI's API, of any make, and how they compare"
    DETAILS = DETAILS
    MODULE = "benchmarks.serve.report"
    contenders: tuple[ServerContender, ...] = ()
    urls: tuple[str, ...] = flag(
        (), f"a server; may be given again (default: {DEFAULT_URL})", name="--url", metavar="[NAME=]URL", whole=True
    )
    models: tuple[str, ...] = flag(
        (), "which of its models (default: the only one)", name="--model", metavar="[NAME=]TEXT", whole=True
    )
    rate: float | None = flag(
        None, "requests a second, however slow the answers are", kind=float, least=0.001, most=100_000, metavar="R"
    )
    concurrency: int = flag(None, "requests at any time (default: 1)", kind=int, least=1, most=4096, metavar="C")
    rounds: int = flag(None, "turns of each contender (default: 6, or as many as requests)", kind=int)
    extra_body: tuple[str, ...] = flag(
        (), "more fields, for all or one contender; null leaves one out", metavar="[NAME=]JSON", whole=True
    )
    api_key_env: tuple[str, ...] = flag(
        (), "variable with the API key, of all or one contender", metavar="[NAME=]VARIABLE", whole=True
    )
    process: tuple[str, ...] = flag(
        (),
        "stop this contender's process group while others have their turn, so that a server that polls takes no time "
        "from them",
        metavar="NAME=PID",
        whole=True,
    )
    prompts: str = flag(
        BUNDLED_PROMPTS,
        "a prompt a line: text, or JSON in *.jsonl; bundled (default): some beginnings of code",
        metavar="FILE",
    )
    chat: bool = flag(False, "send prompts as messages of a user, not as text to continue")
    requests: int = flag(40, "of each contender, in all rounds together", least=1, most=100_000)
    warmup: int = flag(2, "requests of each that do not count", least=0, most=10_000, metavar="W")
    max_tokens: int = flag(64, "of an answer, at most", least=1, most=1_000_000)
    temperature: float = flag(0.0, "0 (default): the likeliest text", least=0, most=100, metavar="X")
    against_plain: bool = flag(False, "measure Paceline also without speculation")
    timeout: float = flag(120.0, "of a request", least=0.001, most=86_400, metavar="S")
    """Seconds after which a request counts as failed."""
    seed: int = flag(0, "of requests, arrivals and resampling", least=0, most=2**31 - 1)
    json: Path | None = flag(None, "write figures and requests there")
    out: Path | None = flag(None, "write figures and a page there", metavar="DIR")

    def checked(self) -> Self:
        """See :class:`benchmarks.harness.options.Options`."""
        if self.rate is not None and self.concurrency is not None:
            raise BadInput("--concurrency: not allowed with --rate")
        rounds = min(6, self.requests) if self.rounds is None else self.rounds
        between("--rounds", rounds, 1, min(1000, self.requests))
        return replace(self, contenders=self._contenders(), concurrency=self.concurrency or 1, rounds=rounds)

    @property
    def command(self) -> str:
        """As it was typed."""
        return shlex.join(["paceline", *sys.argv[1:]])

    def _contenders(self) -> tuple[ServerContender, ...]:
        urls: dict[str, str] = {}
        for given in self.urls or [DEFAULT_URL]:
            name, url = _named(given)
            parts = _split(url)
            name = name or f"{parts.hostname}:{parts.port}" if parts.port else name or str(parts.hostname)
            if name in urls:
                raise BadInput(f"--url {given}: {name!r} is there twice; give names, such as a={url}")
            urls[name] = url.rstrip("/").removesuffix("/v1")
        if len(urls) > MOST_CONTENDERS:
            raise BadInput(f"--url: at most {MOST_CONTENDERS} contenders, got {len(urls)}")
        if any(name.endswith(PLAIN_SUFFIX) for name in urls):
            raise BadInput(f"--url: a name must not end with {PLAIN_SUFFIX!r}, as --against-plain names")
        models = _by_name("--model", self.models, urls)
        extras = {name: _json(text) for name, text in _by_name("--extra-body", self.extra_body, urls).items()}
        keys = {name: _key(variable) for name, variable in _by_name("--api-key-env", self.api_key_env, urls).items()}
        processes = {name: _process(text) for name, text in _by_name("--process", self.process, urls).items()}
        return tuple(
            ServerContender(
                *(name, url, models.get(name, ""), extras.get(name, {}), keys.get(name, "")),
                process=processes.get(name),
            )
            for name, url in urls.items()
        )


def _named(given: str) -> tuple[str, str]:
    """A name and the rest, at the first equals sign; without a name where what stands before it is none."""
    name, separator, rest = given.partition("=")
    if separator and name and not any(sign in name for sign in '/:{"'):
        return name, rest
    return "", given


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment)
        _ = parts.port
    except ValueError:
        usable = False
    if not usable or not url.isascii() or not url.isprintable() or " " in url:
        raise BadInput(f"--url {url}: not an address such as {DEFAULT_URL}")
    if parts.username or parts.password:
        raise BadInput("--url: must not contain a password; name the variable with a key by --api-key-env")
    return parts


def _by_name(flag: str, given: tuple[str, ...], names: Mapping[str, str]) -> dict[str, str]:
    """What is said of each contender; without a name, it is said of all."""
    found: dict[str, str] = {}
    for text in given:
        name, rest = _named(text)
        if name and name not in names:
            raise BadInput(f"{flag} {name}=...: there is no such contender, only {', '.join(names)}")
        for one in [name] if name else names:
            if one in found:
                raise BadInput(f"{flag}: given twice for {one}")
            found[one] = rest
    return found


def _json(text: str) -> Json:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadInput(f"--extra-body {text}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f'--extra-body {text}: must be an object, such as {{"top_p": 0.9}}')
    if value.get("stream", True) is not True or value.get("n") not in (None, 1):
        raise BadInput("--extra-body: requests are streamed and have one answer; leave out stream and n")
    return value


def _process(text: str) -> int:
    """The id of a process whose group can be stopped."""
    try:
        group = os.getpgid(int(text))
    except (ValueError, OverflowError, ProcessLookupError) as error:
        raise BadInput(f"--process {text}: must be the id of a process on this machine") from error
    if group == os.getpgrp():
        raise BadInput(f"--process {text}: is of this command's own process group; start the server by setsid")
    return int(text)


def _key(variable: str) -> str:
    key = current().get(variable, "")
    if not key:
        raise BadInput(f"--api-key-env {variable}: there is no such variable, or it is empty")
    if not (key.isascii() and key.isprintable()):
        raise BadInput(f"--api-key-env {variable}: the key in it must be printable ASCII")
    return key
