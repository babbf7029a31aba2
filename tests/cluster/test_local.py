"""The local backend: child processes that are watched, started again where they were, and end with their parent."""

import json
import re
import shutil
import signal
import time

import httpx
import psutil
import pytest

from tests.cluster.processes import PATIENCE, Paceline, run
from tests.cluster.streams import body, plain, prompts, streamed
from tests.ports import free_port
from tests.stack import MODELS


def broken_model(tmp_path):
    """A model folder whose weights lack a layer: it passes every check but loading."""
    folder = tmp_path / "broken"
    shutil.copytree(MODELS / "target", folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def until_ready(url: str) -> None:
    """Wait until a target is there again."""
    deadline = time.monotonic() + PATIENCE
    while httpx.get(f"{url}/ready", timeout=PATIENCE, trust_env=False).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def up(*arguments: str) -> Paceline:
    """With a core each, so that nothing is measured."""
    common = ["--backend", "local", "--dtype", "fp32", "--threads", "1", "--port", str(free_port())]
    return Paceline("up", *common, *arguments)


@pytest.mark.slow
async def test_a_killed_target_is_started_again_and_the_text_goes_on():
    with up() as paceline:
        paceline.expect("Ctrl-C stops it")
        url = paceline.expect(r"Paceline serves at (\S+)")
        bodies = [body(prompt, 600, temperature=0.8) for prompt in prompts(2)]
        expected = await plain(url, bodies)
        victim = paceline.descendants("worker target")[0]

        async def kill(results):
            victim.kill()

        results = await streamed(url, bodies, kill)
        assert [result.text for result in results] == expected
        paceline.expect(r"target 0 ended \(killed by signal 9\); starting it again")
        paceline.successor(victim, "worker target")
        assert paceline.stop(signal.SIGINT) == 0


@pytest.mark.slow
async def test_a_draft_model_in_the_targets_process_changes_no_text():
    """There is no draft worker, and what was drafted is told as any draft model's."""
    with up("--draft-placement", "shared", "--set", "speculation.lookup=false") as paceline:
        paceline.expect("drafting in turn with .*models/draft")
        url = paceline.expect(r"Paceline serves at (\S+)")
        assert not paceline.descendants("worker draft")
        own = {"sources": ["draft"], "remember": False}
        bodies = [body(prompt, 80, temperature=0.8 * (i % 2)) for i, prompt in enumerate(prompts(4))]
        expected = await plain(url, bodies)
        results = await streamed(url, [{**one, "speculation": own} for one in bodies])
        assert [result.text for result in results] == expected
        async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as client:
            (worker,) = (await client.get(f"{url}/cluster")).json()["workers"]
            metrics = (await client.get(f"{url}/metrics")).text
        assert worker["sources"]["draft"]["accepted"] > 0
        assert re.search(r"^paceline_draft_model_seconds_total\{.*\} [\d.e-]*[1-9]", metrics, re.MULTILINE)
        assert paceline.stop(signal.SIGINT) == 0


@pytest.mark.slow
def test_killing_the_supervisor_ends_everything():
    with up("--no-speculation", "--demo") as paceline:
        paceline.expect("no drafts were offered")
        children = paceline.descendants()
        assert len(children) == 2
        paceline.process.send_signal(signal.SIGKILL)
        gone, alive = psutil.wait_procs(children, timeout=60)
        assert len(gone) == 2
        assert not alive


@pytest.mark.thorough
@pytest.mark.slow
def test_with_certificates_and_keys_everything_works_and_strangers_are_refused(tmp_path):
    folder = tmp_path / "certs"
    made = run("certs", str(folder))
    assert made.returncode == 0, made.stderr
    settings = tmp_path / "paceline.yaml"
    settings.write_text(made.stdout.partition("\n")[2].partition("\n")[2] + f"  api_keys: {tmp_path}/keys\n")
    (tmp_path / "keys").write_text("me: sk-0123456789abcdef\n")
    with up("--config", str(settings), "--demo") as paceline:
        paceline.expect("drafts accepted")
        url = paceline.expect(r"Paceline serves at (\S+)")
        refused = run("complete", "x", "--url", url)
        assert refused.returncode == 2
        assert refused.stderr.startswith("paceline: the server refused: give an API key")
        assert run("certs", str(folder), "--renew").returncode == 0
        victim = paceline.descendants("worker target")[0]  # comes back with its new certificate
        victim.kill()
        paceline.successor(victim, "worker target")
        until_ready(url)
        arguments = ["--max-tokens", "4", "--no-compare", "--api-key", "sk-0123456789abcdef"]
        with_key = run("complete", "x", "--url", url, *arguments)
        assert with_key.returncode == 0, with_key.stderr
        assert paceline.stop(signal.SIGINT) == 0
        assert "sk-0123456789abcdef" not in paceline.output


def test_a_model_that_cannot_be_loaded_is_told_in_one_line(tmp_path):
    model = broken_model(tmp_path)
    reason = rf"{model}: the weights lack \d+ tensors of the model, first .*"
    with up("--target", str(model)) as paceline:
        assert re.fullmatch(reason, paceline.expect(r"^paceline: target 0 cannot start: (.*)"))
        assert paceline.ended() == 1
    alone = run("worker", "target", "--model", str(model), "--listen", "127.0.0.1:0")
    assert alone.returncode == 2
    assert re.fullmatch(rf"paceline: {reason}", alone.stderr.splitlines()[-1])
