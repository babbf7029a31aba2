"""The guide as an operator follows it: its lines for a Ray cluster, taken from its pages, on pretend nodes.

Only addresses, file names and ports are put in the place of the page's.
"""

import asyncio
import re
import shlex
import subprocess
from collections.abc import Mapping

import httpx
import pytest

from tests.cluster.pretend_nodes import ENVIRONMENT, LARGE, SMALL
from tests.cluster.processes import CHECKOUT, PATIENCE, STARTS, Paceline, run
from tests.cluster.streams import body, plain, prompts, streamed
from tests.cluster.test_serve_ranks import Nodes
from tests.ports import free_port
from tests.ranks import needs_no_gpu
from tests.stack import MODELS

pytestmark = [pytest.mark.slow, pytest.mark.thorough, needs_no_gpu]
SETTINGS = """\
target: {{gpus: {gpus}, device: cpu, gpu_class: large, dtype: fp32, max_running: {max_running}}}
draft: {{gpus: 1, device: cpu, gpu_class: small, dtype: fp32}}
router: {{port: {port}}}
ray: {{placement_timeout: 120}}
"""
ROLES = {"target": "TargetWorker", "draft": "DraftWorker", "router": "Router"}


def block(page: str, above: str) -> list[str]:
    """The lines of the first block below a heading, or other words."""
    _, below = text_of(page).split(f"\n{above}\n")
    found = re.search(r"^```\n(.*?)^```", below, re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no block below {above}"
    return found[1].splitlines()


def within(page: str, beginning: str) -> str:
    """The command that begins so: a line of a block, or words of the text between backquotes."""
    found = re.findall(rf"^({re.escape(beginning)}.*)$|`({re.escape(beginning)}[^`]*)`", text_of(page), re.MULTILINE)
    assert found, f"{page} does not say {beginning}"
    line, words = found[0]
    return " ".join((line or words).split())


def arguments(line: str, names: Mapping[str, object]) -> list[str]:
    """What a line gives to ``paceline``, with other names in the place of the page's."""
    for theirs, ours in names.items():
        line = line.replace(theirs, str(ours))
    program, *given = shlex.split(line, comments=True)
    assert program == "paceline"
    return given


def text_of(page: str) -> str:
    return (CHECKOUT / "docs" / page).read_text(encoding="utf-8")


class Operator:
    """Who has a cluster of these nodes, and follows the guide there."""

    def __init__(self, nodes: Nodes, tmp_path) -> None:
        self.nodes, self.port = nodes, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.file = tmp_path / "paceline.yaml"
        self.edit()
        self.names = {
            "HOST:6379": nodes.address,
            "--address auto": f"--address {nodes.address}",
            "paceline.yaml": str(self.file),
            "http://HOST:PORT": self.url,
        }

    def edit(self, *, port: int = 0, gpus: int = 1, max_running: int = 64) -> None:
        """Write the file of settings."""
        self.file.write_text(SETTINGS.format(port=port or self.port, gpus=gpus, max_running=max_running))

    def follow(self, line: str, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        """Do what a line says."""
        return run(*arguments(line, self.names), timeout=timeout)

    def sees(self, line: str, *patterns: str, timeout: float = PATIENCE) -> str:
        """Do what a line says; it succeeds and prints all of these. What it printed on stdout."""
        done = self.follow(line, timeout)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        found = [re.search(pattern, done.stdout + done.stderr, re.MULTILINE) for pattern in patterns]
        assert all(found), f"{line}\n{done.stdout}{done.stderr}\nlacks one of {patterns}"
        return done.stdout

    def is_refused(self, line: str, pattern: str) -> None:
        """Do what a line says, in vain; what serves is left alone."""
        refused = self.follow(line)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert re.search(pattern, refused.stderr), refused.stderr
        assert self.models()

    def models(self) -> list[dict]:
        """What is served."""
        return httpx.get(f"{self.url}/v1/models", timeout=PATIENCE, trust_env=False).json()["data"]

    def processes(self) -> dict[str, set[int]]:
        """The replicas of each role: two of them are routers, since two nodes may hold one."""
        replicas = {role: self.nodes.find(f"ray::ServeReplica:paceline:{kind}") for role, kind in ROLES.items()}
        return {role: {process.pid for process in found} for role, found in replicas.items()}


@pytest.fixture
def operator(monkeypatch, tmp_path):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    started = Nodes()
    try:
        yield Operator(started, tmp_path)
    finally:
        started.stop()


async def test_a_ray_cluster_is_served_looked_at_changed_and_left_by_the_lines_of_the_guide(operator):
    look, serve, change, remove = block("install.md", "## On a Ray cluster")

    room = r"^ok       ray: 3 nodes \(paceline\.io/gpu-class: 1 x large, .*1 x small\), 3 GPUs: room for every pool$"
    same = r"^ok       nodes: all 3 run what this machine does$"
    models = r"^ok       model of target: .* tensors"
    operator.sees(look, room, same, models, r"^ok       versions: torch ", r"application: not deployed yet")

    said = operator.sees(
        serve, "It is left running", f"`paceline down --address {operator.nodes.address}`", timeout=STARTS
    )
    (suggested,) = re.findall(r"^  (paceline complete .*)$", said, re.MULTILINE)
    operator.sees(suggested, r"drafts accepted \(\d+%\); .* the speed of plain decoding .*same text")
    look_around(operator)

    operator.edit(port=free_port())
    operator.is_refused(change, f"already and listens on 127.0.0.1:{operator.port}, not on 127.0.0.1:")
    operator.edit(gpus=9)
    operator.is_refused(change, "no room for")
    operator.edit()
    operator.is_refused(change.replace(" --detach", ""), "is deployed at .* already")

    bodies = [body(prompt, 600, temperature=0.8) for prompt in prompts(2)]
    expected, before = await plain(operator.url, bodies), operator.processes()
    operator.edit(max_running=8)
    assert await while_streaming(operator, bodies, change) == expected
    after = operator.processes()
    assert {role for role in ROLES if before[role] != after[role]} == {"target"}, "limits of targets replace targets"

    assert await while_streaming(operator, bodies, remove) == expected
    with pytest.raises(httpx.ConnectError):
        operator.models()
    again = operator.follow(remove)
    nothing = f"paceline: no Paceline is deployed at {operator.nodes.address}\n"
    assert (again.returncode, again.stderr) == (1, nothing)


def look_around(operator: Operator) -> None:
    """What the guide says of the doctor where something serves. On a busy machine it warns of uneven round trips."""
    trips = [rf"^(ok|warning) +{role} {host}:\d+: .*round trip" for role, host in (("target", LARGE), ("draft", SMALL))]
    in_ray = within("operations.md", "paceline doctor --config paceline.yaml --address auto")
    said = operator.sees(in_ray, *trips, r"^ok       application: running$")
    addresses = dict(re.findall(r"^\w+ +(target|draft) (\S+): ", said, re.MULTILINE))
    by_url = within("operations.md", "paceline doctor --url")
    operator.sees(by_url, r"streams \d+ tokens.*, the same text with and without drafts, \d+% of drafts accepted$")
    distance = within("troubleshooting.md", "paceline doctor --target ... --draft ... --target-step-ms")
    for role, address in addresses.items():
        distance = distance.replace(f"--{role} ...", f"--{role} {address}")
    operator.sees(distance.replace(" N", " 30"), *trips, r"^\w+ +distance: .* times as fast as plain decoding")


async def while_streaming(operator: Operator, bodies: list[dict], line: str) -> list[str]:
    """The texts of requests during which a line is followed."""

    async def meanwhile(results):
        await asyncio.to_thread(operator.sees, line, timeout=STARTS)

    results = await streamed(operator.url, bodies, meanwhile)
    assert all(result.done for result in results)
    return [result.text for result in results]


def test_the_doctor_says_whether_a_new_pair_fits_by_the_line_of_the_guide():
    line = within("upgrade.md", "paceline doctor --set")
    said = run(*arguments(line, {"./new-draft": MODELS / "draft", "./new": MODELS / "target"})).stdout
    for role in ("target", "draft"):
        assert re.search(rf"^ok       model of {role}: {MODELS / role}: ", said, re.MULTILINE), said
    assert "ok       vocabulary of draft: that of the target\n" in said


def test_a_pair_is_recorded_and_simulated_by_the_lines_of_the_guide(tmp_path):
    """On loopback, with ports of their own, and not at all those distances and loads, which take minutes."""
    lines = block("size.md", 'traffic, half of it with `"speculation": {"enabled": false}`, and simulate from that:')
    ports = {role: free_port() for role in ("target", "draft", "router")}
    names = {"./llama-8b": MODELS / "target", "./llama-1b": MODELS / "draft"}
    names |= {f"{role}.jsonl": tmp_path / f"{role}.jsonl" for role in ("target", "draft")}
    names |= {"127.0.0.1:7001": f"127.0.0.1:{ports['target']}", "127.0.0.1:7002": f"127.0.0.1:{ports['draft']}"}
    names |= {"0.5,5,20": "0.5,20", "1,4,16,64": "1,2", "1,2,4": "1"}
    target, draft, router, simulate = (arguments(line, names) for line in lines)
    common, url = ["--dtype", "fp32"], f"http://127.0.0.1:{ports['router']}"
    with (
        Paceline(*target, "--listen", f"127.0.0.1:{ports['target']}", *common) as target_worker,
        Paceline(*draft, "--listen", f"127.0.0.1:{ports['draft']}", *common) as draft_worker,
    ):
        target_worker.expect("^target worker ready on")
        draft_worker.expect("^draft worker ready on")
        with Paceline(*router, "--port", str(ports["router"])) as served:
            served.expect("^router ready on")
            for prompt in prompts(3):
                asked = run("complete", prompt, "--url", url, "--max-tokens", "64")  # with drafts, then without
                assert asked.returncode == 0, asked.stderr
    simulated = run(*simulate)
    assert simulated.returncode == 0, simulated.stderr
    cells = [[cell.strip() for cell in row.split("│")[1:-1]] for row in simulated.stdout.splitlines() if "│" in row]
    tried = {tuple(row[1:3]) for row in cells if row[0] == "trie"}
    assert tried == {(trip, sessions) for trip in ("0.5", "20") for sessions in ("1", "2")}
    assert re.search(r"^trie, round trip 0.5 ms, 1 target, 1 drafter: ", simulated.stdout, re.MULTILINE)
