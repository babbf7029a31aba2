"""The commands as a user runs them: mistakes answered in one line, and worker, router and complete end to end."""

import json
import re
import shutil
import signal
import socket

import httpx
import pytest

from cluster.local import free_port
from tests.cluster.processes import Paceline, run
from tests.stack import MODELS

PROMPT = "import os\n\n\ndef "
NO_CERTIFICATES = [
    "--certificate",
    "/nowhere/{role}.crt",
    "--key",
    "/nowhere/{role}.key",
    "--authority",
    "/nowhere/ca.crt",
]


@pytest.fixture(scope="module")
def serving(slow_target):
    """Target, drafter and router, one process each: their URL."""
    target, draft, port = (free_port() for _ in range(3))
    common = ["--dtype", "fp32"]
    with (
        Paceline(
            "worker", "target", "--model", str(slow_target), "--listen", f"127.0.0.1:{target}", *common
        ) as target_worker,
        Paceline("worker", "draft", "--listen", f"127.0.0.1:{draft}", *common) as draft_worker,
    ):
        line = target_worker.expect("ready on", 60)
        assert re.fullmatch(rf"target worker ready on 127\.0\.0\.1:{target} \({slow_target}, float32\)", line)
        draft_worker.expect(rf"^draft worker ready on 127\.0\.0\.1:{draft} ", 60)
        addresses = ["--target", f"127.0.0.1:{target}", "--draft", f"127.0.0.1:{draft}"]
        with Paceline("router", *addresses, "--port", str(port)) as router:
            router.expect("^router ready on")
            yield f"http://127.0.0.1:{port}"
            assert router.stop(signal.SIGTERM) == 0
        assert target_worker.stop(signal.SIGTERM) == 0
        assert draft_worker.stop(signal.SIGINT) == 0


def test_complete_streams_and_measures(serving):
    done = run("complete", PROMPT, "--url", serving, "--max-tokens", "40")
    assert done.returncode == 0, done.stderr
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "speculation": {"enabled": False}}
    plain = httpx.post(f"{serving}/v1/completions", json=body).json()["choices"][0]["text"]
    assert done.stdout == plain + "\n"
    assert re.search(r"40 tokens at [\d.]+ tokens/s; \d+ of \d+ drafts accepted \(\d+%\)", done.stderr)
    assert re.search(r"[\d.]+x the speed of plain decoding \([\d.]+ tokens/s, .*; same text\)", done.stderr)


def test_complete_reads_standard_input_and_repeats_a_seed(serving):
    arguments = ["complete", "-", "--url", serving, "--max-tokens", "20", "--temperature", "0.8", "--seed", "5"]
    first = run(*arguments, stdin=PROMPT)
    second = run(*arguments, "--no-compare", stdin=PROMPT)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert "plain decoding" in first.stderr
    assert "plain decoding" not in second.stderr


def test_complete_shows_what_the_server_refuses(serving):
    refused = run("complete", PROMPT, "--url", serving, "--max-tokens", "0")
    assert refused.returncode == 2
    assert re.fullmatch(r"paceline: the server refused: max_tokens must .*\n", refused.stderr)


def test_a_worker_that_is_there_already(serving):
    port = httpx.URL(serving).port
    for arguments in (["worker", "draft", "--listen", f"127.0.0.1:{port}"], ["up", "--port", str(port)]):
        refused = run(*arguments)
        assert refused.returncode == 2
        assert refused.stderr == f"paceline: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.fixture
def other_vocabulary(tmp_path):
    """The bundled draft model, but with two tokens exchanged."""
    folder = tmp_path / "other"
    shutil.copytree(MODELS / "draft", folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    one, other = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize("backend", ["ray", "local"])
def test_different_vocabularies_are_refused_before_anything_starts(other_vocabulary, backend):
    refused = run("up", "--draft", str(other_vocabulary), "--backend", backend, "--port", str(free_port()))
    assert refused.returncode == 2
    words = rf"paceline: target .*models/target and draft {other_vocabulary} have different vocabularies \(.*2 of them"
    assert re.match(words, refused.stderr)
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["up", "--target", "/nowhere/model"], 2, "/nowhere/model: no such folder"),
        (["up", "--draft", "./nowhere"], 2, "./nowhere: no such folder"),
        (["worker", "target", "--model", "nowhere"], 2, "nowhere: no such folder"),
        (["worker", "target", "--model", str(MODELS)], 2, "it has no config.json"),
        (["worker", "target", "--listen", "7001"], 2, "'7001' is not HOST:PORT"),
        (["worker", "draft", "--listen", "0.0.0.0:7001"], 2, "--allow-remote"),
        (["up", "--host", "0.0.0.0"], 2, "there is no authentication"),
        (["router", "--target", "127.0.0.1:7001", "--host", "192.0.2.1"], 2, "--allow-remote"),
        (["router", "--target", "somewhere"], 2, "'somewhere' is not HOST:PORT"),
        (["router"], 2, "give --target HOST:PORT, at least once, or --workers FILE"),
        (["up", "--backend", "local", "--router-replicas", "2"], 2, "the local backend runs one router"),
        (["up", "--prot", "1"], 2, "unknown argument '--prot', did you mean --port?"),
        (["worker", "draft", "--modle", "x"], 2, "did you mean --model?"),
        (["worker", "drft"], 2, "invalid choice: 'drft'"),
        (["wroker"], 2, "unknown command 'wroker'; did you mean 'worker'?"),
        (["up", "--set", "router.prot=1"], 2, "did you mean 'router.port'?"),
        (["up", "--config", "/nowhere.yaml"], 2, "cannot read /nowhere.yaml"),
        (["up", "--address", "127.0.0.1:1"], 1, "no Ray cluster at 127.0.0.1:1 (Connection refused)"),
        (["config", "--set", "rubbish"], 2, "is not KEY=VALUE"),
        (["complete"], 2, "give a prompt"),
        (["complete", "x", "--api-key", "k\u00e9y"], 2, "must be printable ASCII"),
        (["up", "--certificate", "/c.crt"], 2, "security.key and security.authority must be given as well"),
        (["up", "--api-keys", "/nowhere"], 2, "security.api_keys /nowhere: cannot be read"),
        (["router", "--target", "127.0.0.1:7001", *NO_CERTIFICATES], 2, "security.certificate /nowhere/router.crt:"),
        (["worker", "draft", "--listen", "0.0.0.0:7001", *NO_CERTIFICATES], 2, "/nowhere/draft.crt: cannot be read"),
        (["certs", "/proc/nowhere"], 2, "cannot write to /proc/nowhere"),
        (["certs", "/nowhere", "--renew"], 2, "/nowhere/ca.crt: cannot be read"),
        (["certs", "/nowhere", "--days", "0"], 2, "--days must be a whole number from 1 to 3650, got 0"),
        (["complete", "x", "--url", "ftp://x"], 2, "--url ftp://x"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments, code, words):
    refused = run(*arguments)
    assert (refused.returncode, refused.stdout) == (code, "")
    assert words in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.fixture
def truncated(tmp_path):
    """The bundled draft model, but without the end of its weights."""
    folder = tmp_path / "truncated"
    shutil.copytree(MODELS / "draft", folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


def test_what_only_loading_shows_is_the_last_line(truncated):
    for flags, words in (
        (["--model", str(truncated)], rf"{truncated}: cannot load the weights: .*"),
        (["--record", "/nowhere/x"], "cannot record to /nowhere/x: No such file or directory; give a file that .*"),
    ):
        refused = run("worker", "target", "--listen", f"127.0.0.1:{free_port()}", *flags)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert re.fullmatch(f"paceline: {words}", refused.stderr.splitlines()[-1])
        assert "Traceback" not in refused.stderr


def test_no_server():
    port = free_port()
    refused = run("complete", "x", "--url", f"http://127.0.0.1:{port}")
    assert refused.returncode == 1
    assert refused.stderr == f"paceline: no Paceline at http://127.0.0.1:{port}; start one with `paceline up`\n"


def test_a_port_in_use_is_told_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = run("up", "--port", str(port), timeout=10)
    assert refused.stderr == f"paceline: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_help_names_every_command_and_starts_fast():
    shown = run("--help", timeout=5)
    assert shown.returncode == 0
    for command in ("up", "complete", "worker", "router", "config", "certs"):
        assert re.search(rf"^    {command} ", shown.stdout, re.MULTILINE)
        assert "paceline " + command in run(command, "--help", timeout=5).stdout
