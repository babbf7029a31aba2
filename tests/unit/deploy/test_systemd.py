"""The units under deploy/systemd: systemd understands them, our own parser their commands, and readiness is told."""

import configparser
import os
import re
import shlex
import shutil
import socket
import subprocess

import pytest

from cluster.cli import COMMANDS, _parsers
from cluster.config.environment import CHECKOUT
from cluster.config.flags import configuration
from cluster.discovery import read_list
from cluster.processes.starting import READY, STOPPING, notify
from speculation.events import Role
from transport.address import parse

UNITS = CHECKOUT / "deploy" / "systemd"
ETC = UNITS / "etc"
EXAMPLES = {Role.TARGET: "target-7001.env", Role.DRAFT: "draft-7002.env"}
SERVICES = {
    "paceline-target@.service": "target-7001",
    "paceline-draft@.service": "draft-7002",
    "paceline-router.service": None,
}


class _Unit(configparser.ConfigParser):
    """Keys keep their case."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def unit(name):
    """A service with what all have in common below it."""
    read = _Unit(interpolation=None, strict=True, delimiters=("=",), comment_prefixes=("#",))
    read.read([UNITS / "paceline-.service.d" / "common.conf", UNITS / name])
    return read


def environment(file):
    """As systemd reads it: a value is the rest of the line."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def expanded(command, variables):
    """Arguments as systemd makes them: ``${X}`` is one word, ``$X`` as many as it has."""
    words = []
    for word in command.split():
        if match := re.fullmatch(r"\$(\w+)", word):
            words += shlex.split(variables.get(match[1], ""))
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], word))
    return words


def parsed(name):
    """What our own command line makes of the service's command, with the example settings beside it."""
    instance = SERVICES[name]
    variables = environment(ETC / f"{instance}.env") if instance else {}
    program, *arguments = expanded(unit(name)["Service"]["ExecStart"], variables)
    assert program == "/opt/paceline/.venv/bin/paceline"
    arguments = [word.replace("/etc/paceline", str(ETC)) for word in arguments]
    return _parsers(COMMANDS)[0].parse_args(arguments)


def test_these_are_all_services():
    assert {file.name for file in UNITS.glob("*.service")} == set(SERVICES)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_runs_a_command_that_exists(name):
    args = parsed(name)
    config = configuration(args)
    assert config.target.model == "/srv/models/llama-8b"
    if "worker" in args.command:
        assert f"paceline-{args.role}@.service" == name
        assert args.listen == f"127.0.0.1:{SERVICES[name].split('-')[1]}"
        assert config.target.tensor_parallel_size == (2 if args.role == "target" else 1)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_restarted_drains_and_has_no_rights(name):
    service = unit(name)["Service"]
    assert (service["Type"], service["Restart"], service["User"]) == ("notify", "always", "paceline")
    assert (service["NoNewPrivileges"], service["ProtectSystem"], service["CapabilityBoundingSet"]) == (
        "yes",
        "strict",
        "",
    )
    assert int(service["TimeoutStopSec"]) >= 120
    assert service["KillMode"] == "mixed", "ranks that end with their worker's drain would end the worker"
    assert unit(name)["Unit"]["StartLimitIntervalSec"] == "0"
    for closed in ("PrivateDevices", "ProtectClock", "MemoryDenyWriteExecute"):  # would keep GPUs or PyTorch out
        assert closed not in service


def test_the_example_list_names_the_example_workers():
    workers = read_list(ETC / "workers.txt")
    listen = {role: environment(ETC / name)["LISTEN"] for role, name in EXAMPLES.items()}
    assert workers == {role: [address] for role, address in listen.items()}
    assert all(parse(address) for address in listen.values())


def verify(folder):
    """What ``systemd-analyze`` says of our units. Older ones do not know the pauses that grow (systemd 254)."""
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(name.replace("@.", "@1.") for name in SERVICES)],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:/usr/lib/systemd/system:/lib/systemd/system"},
        capture_output=True,
        text=True,
        timeout=30,
        cwd=folder,
    )
    lines = [line for line in found.stderr.splitlines() if "paceline" in line]
    return [line for line in lines if not re.search(r"Unknown key.*Restart(Steps|MaxDelaySec)", line)]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze")
def test_systemd_understands_the_units(tmp_path):
    shutil.copytree(UNITS, tmp_path, dirs_exist_ok=True)
    for file in tmp_path.glob("*.service"):  # systemd looks whether the program is there
        file.write_text(file.read_text().replace("/opt/paceline/.venv/bin/paceline", "/bin/true"))
    assert verify(tmp_path) == []
    common = tmp_path / "paceline-.service.d" / "common.conf"
    common.write_text(common.read_text() + "Planted=fault\n")
    assert {line.rpartition("/")[2].partition(":")[0] for line in verify(tmp_path)} == {"common.conf"}


def test_readiness_reaches_who_started_the_service(tmp_path, monkeypatch):
    abstract = f"paceline-test-{os.getpid()}"
    for address, name in ((str(tmp_path / "notify"), str(tmp_path / "notify")), (f"\0{abstract}", f"@{abstract}")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.settimeout(60)
            systemd.bind(address)
            monkeypatch.setenv("NOTIFY_SOCKET", name)
            notify(READY)
            assert systemd.recv(100) == b"READY=1"
    notify(STOPPING)  # nobody listens any more
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify(READY)
