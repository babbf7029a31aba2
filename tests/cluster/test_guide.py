"""Paceline that stays on a Ray cluster when the terminal is left: put there, looked at, changed and removed."""

import json
import re

import httpx
import pytest

from tests.cluster.pretend_nodes import ENVIRONMENT, LARGE, SMALL
from tests.cluster.processes import PATIENCE, STARTS, run
from tests.cluster.test_serve_ranks import Nodes
from tests.ports import free_port
from tests.ranks import needs_no_gpu

pytestmark = [pytest.mark.slow, pytest.mark.thorough, needs_no_gpu]
SETTINGS = """\
target: {gpus: 1, device: cpu, gpu_class: large, dtype: fp32}
draft: {gpus: 1, device: cpu, gpu_class: small, dtype: fp32}
ray: {placement_timeout: 120}
"""


@pytest.fixture
def nodes(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    started = Nodes()
    yield started
    started.stop()


def test_up_stays_until_down(nodes, tmp_path):
    file = tmp_path / "paceline.yaml"
    file.write_text(SETTINGS)
    port = free_port()
    url, where = f"http://127.0.0.1:{port}", ["--address", nodes.address]
    up = ["up", "--config", str(file), *where, "--port", str(port)]

    started = run(*up, "--detach", timeout=STARTS)
    assert started.returncode == 0, started.stderr
    assert f"`paceline down --address {nodes.address}` ends it." in started.stdout

    looked = run("doctor", "--config", str(file), *where, "--url", url, "--json")
    found = {finding["subject"].split(":")[0]: finding for finding in json.loads(looked.stdout)}
    assert looked.returncode == 0, looked.stdout
    assert "round trip" in found[f"target {LARGE}"]["text"]
    assert "round trip" in found[f"draft {SMALL}"]["text"]
    assert "the same text with and without drafts" in found["http http"]["text"]

    for arguments, words in (
        ([], "is deployed at .* already"),
        (["--detach", "--set", "target.gpus=9"], "no room for"),
        (["--detach", "--port", str(free_port())], f"already and listens on 127.0.0.1:{port}, not on 127.0.0.1:"),
    ):
        refused = run(*up, *arguments)
        assert refused.returncode == 1
        assert re.search(words, refused.stderr)
        assert httpx.get(f"{url}/v1/models", timeout=PATIENCE, trust_env=False).json()["data"], (
            "what serves must be left alone"
        )

    assert run("down", *where).returncode == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/v1/models", timeout=PATIENCE, trust_env=False)
    again = run("down", *where)
    assert (again.returncode, again.stderr) == (1, f"paceline: no Paceline is deployed at {nodes.address}\n")
