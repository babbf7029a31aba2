"""The commands as a user runs them: mistakes answered in one line, and worker, router and complete end to end."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from cluster import cli
from cluster.config.config import load
from cluster.config.serving import worker_config
from cluster.config.settings import Override
from speculation.events import Role
from tests.bundled import with_other_vocabulary
from tests.cluster.processes import CHECKOUT, PATIENCE, Paceline, run
from tests.ports import free_port
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
        line = target_worker.expect("ready on")
        assert re.fullmatch(rf"target worker ready on 127\.0\.0\.1:{target} \({slow_target}, float32\)", line)
        draft_worker.expect(rf"^draft worker ready on 127\.0\.0\.1:{draft} ")
        addresses = ["--target", f"127.0.0.1:{target}", "--draft", f"127.0.0.1:{draft}"]
        with Paceline("router", *addresses, "--port", str(port)) as router:
            router.expect("^router ready on")
            yield f"http://127.0.0.1:{port}"
            assert router.stop(signal.SIGTERM) == 0
        assert target_worker.stop(signal.SIGTERM) == 0
        assert draft_worker.stop(signal.SIGINT) == 0


@pytest.mark.thorough
def test_complete_streams_and_measures(serving):
    done = run("complete", PROMPT, "--url", serving, "--max-tokens", "40")
    assert done.returncode == 0, done.stderr
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "speculation": {"enabled": False}}
    answer = httpx.post(f"{serving}/v1/completions", json=body, timeout=PATIENCE, trust_env=False)
    assert done.stdout == answer.json()["choices"][0]["text"] + "\n"
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
    return with_other_vocabulary(tmp_path / "other")


def test_a_draft_worker_of_another_vocabulary_is_told_of_the_targets(other_vocabulary):
    config = load(overrides=[Override("draft.model", str(other_vocabulary), "--draft")])
    told = {pool.role: worker_config(config, pool).draft.target_tokenizer for pool in config.pools()}
    assert told == {Role.TARGET: "", Role.DRAFT: str(MODELS / "target")}
    assert not any(worker_config(load(), pool).draft.target_tokenizer for pool in load().pools())


@pytest.mark.parametrize("named", [True, False])
def test_a_draft_worker_by_hand_finds_out_that_it_has_to_translate(other_vocabulary, tmp_path, monkeypatch, named):
    """Where its settings say whom it drafts for: the bundled target is nobody's choice."""
    told = []

    async def serve(role, config, listen):
        told.append(config.draft.target_tokenizer)
        return 0

    monkeypatch.setattr("cluster.commands.worker._serve", serve)
    copied = shutil.copytree(MODELS / "target", tmp_path / "copied")
    path = tmp_path / "paceline.yaml"
    path.write_text(f"target: {{model: {copied}}}\n" if named else "")
    arguments = ["worker", "draft", "--config", str(path), "--listen", "127.0.0.1:0"]
    assert cli.main([*arguments, "--model", str(other_vocabulary)]) == 0
    assert cli.main([*arguments, "--model", str(MODELS / "draft")]) == 0
    assert told == [str(copied) if named else "", ""]


@pytest.mark.parametrize(
    "arguments", [["up", "--draft-placement", "shared", "--draft"], ["worker", "target", "--draft-model"]]
)
def test_another_vocabulary_cannot_draft_in_the_targets_process(other_vocabulary, arguments):
    free = ["--port", str(free_port())] if arguments[0] == "up" else ["--listen", "127.0.0.1:0"]
    refused = run(*arguments, str(other_vocabulary), *free)
    assert refused.returncode == 2
    assert str(other_vocabulary) in refused.stderr and str(MODELS / "target") in refused.stderr
    assert "set draft.placement to own" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--target", "/nowhere/model"], "/nowhere/model: no such folder"),
        (["up", "--draft", "./nowhere"], "./nowhere: no such folder"),
        (["worker", "target", "--model", "nowhere"], "nowhere: no such folder"),
        (["worker", "target", "--model", str(MODELS)], "it has no config.json"),
        (["up", "--draft-placement", "shared", "--draft", "./nowhere"], "--draft ./nowhere: no such folder"),
        (["up", "--draft-placement", "both"], "draft.placement must be one of auto, own, shared, cpu, got 'both'"),
        (["worker", "target", "--draft-model", "./nowhere"], "--draft-model ./nowhere: no such folder"),
        (["worker", "draft", "--target-tokenizer", "/nowhere"], "--target-tokenizer /nowhere: no such folder"),
        (["up", "--set", "draft.target_tokenizer=/nowhere"], "draft.target_tokenizer /nowhere: no such folder"),
        (["worker", "target", "--listen", "7001"], "'7001' is not HOST:PORT"),
        (["worker", "draft", "--listen", "0.0.0.0:7001"], "--allow-remote"),
        (["up", "--host", "0.0.0.0"], "there is no authentication"),
        (["router", "--target", "127.0.0.1:7001", "--host", "192.0.2.1"], "--allow-remote"),
        (["router", "--target", "somewhere"], "'somewhere' is not HOST:PORT"),
        (["router", "--target", "127.0.0.1:7001", "--tokenizer", "/nowhere"], "--tokenizer /nowhere: no such folder"),
        (["up", "--set", "router.tokenizer=/nowhere"], "router.tokenizer /nowhere: no such folder"),
        (["router"], "give --target HOST:PORT, at least once, or --workers FILE"),
        (["up", "--backend", "local", "--router-replicas", "2"], "the local backend runs one router"),
        (["up", "--backend", "local", "--address", "auto"], "--address auto is a Ray cluster, which --backend local"),
        (["up", "--prot", "1"], "unknown argument '--prot', did you mean --port?"),
        (["worker", "draft", "--modle", "x"], "did you mean --model?"),
        (["worker", "drft"], "invalid choice: 'drft'"),
        (["wroker"], "unknown command 'wroker'; did you mean 'worker'?"),
        (["up", "--set", "router.prot=1"], "did you mean 'router.port'?"),
        (["up", "--config", "/nowhere.yaml"], "cannot read /nowhere.yaml"),
        (["config", "--set", "rubbish"], "is not KEY=VALUE"),
        (["complete"], "give a prompt"),
        (["complete", "x", "--api-key", "k\u00e9y"], "must be printable ASCII"),
        (["up", "--certificate", "/c.crt"], "security.key and security.authority must be given as well"),
        (["up", "--api-keys", "/nowhere"], "security.api_keys /nowhere: cannot be read"),
        (["router", "--target", "127.0.0.1:7001", *NO_CERTIFICATES], "security.certificate /nowhere/router.crt:"),
        (["worker", "draft", "--listen", "0.0.0.0:7001", *NO_CERTIFICATES], "/nowhere/draft.crt: cannot be read"),
        (["certs", "/proc/nowhere"], "cannot write to /proc/nowhere"),
        (["certs", "/nowhere", "--renew"], "/nowhere/ca.crt: cannot be read"),
        (["certs", "/nowhere", "--days", "0"], "--days must be a whole number from 1 to 3650, got 0"),
        (["complete", "x", "--url", "ftp://x"], "--url ftp://x"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments, words, capfd):
    """And leaves nothing behind: it is run in this process."""
    environment = dict(os.environ)
    try:
        code = cli.main(arguments)
    except SystemExit as ended:  # of a parser
        code = ended.code
    said = capfd.readouterr()
    assert (code, said.out) == (2, "")
    assert words in said.err
    assert said.err.count("\n") == 1
    assert os.environ == environment


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_worker_takes_no_model_from_a_list_of_several(role, tmp_path, capfd):
    """A router does, for their tokenizers; so they may have one file."""
    path = tmp_path / "paceline.yaml"
    path.write_text("models: {llama: {target: {model: /nowhere/llama}}}\n")
    arguments = ["worker", role, "--config", str(path), "--listen", "127.0.0.1:0"]
    assert cli.main(arguments) == 2
    assert (
        f"{path} lists models, and a worker by hand belongs to no pool of theirs; say by --model"
        in capfd.readouterr().err
    )
    assert cli.main([*arguments, "--model", "/nowhere/qwen"]) == 2
    assert "--model /nowhere/qwen: no such folder" in capfd.readouterr().err


def test_no_ray_cluster():
    refused = run("up", "--address", "127.0.0.1:1")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert re.fullmatch(r"paceline: no Ray cluster at 127\.0\.0\.1:1 \(Connection refused\).*\n", refused.stderr)


@pytest.fixture
def truncated(tmp_path):
    """The bundled draft model, but without the end of its weights."""
    folder = tmp_path / "truncated"
    shutil.copytree(MODELS / "draft", folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


@pytest.mark.thorough
def test_what_only_loading_shows_is_the_last_line(truncated):
    for flags, words in (
        (["--model", str(truncated)], rf"{truncated}: cannot load the weights: .*"),
        (["--record", "/nowhere/x"], "cannot record to /nowhere/x: No such file or directory; give a file that .*"),
    ):
        address = f"127.0.0.1:{free_port()}"
        refused = run("worker", "target", "--listen", address, *flags)
        assert (refused.returncode, refused.stdout) == (2, f"target worker loading on {address}\n")
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
        refused = run("up", "--port", str(port))
    assert refused.stdout == "", "something was started before"
    assert refused.stderr == f"paceline: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_help_names_every_command_and_loads_nothing_heavy():
    shown = run("--help")
    assert shown.returncode == 0
    for command in ("up", "complete", "worker", "router", "config", "certs"):
        assert re.search(rf"^    {command} ", shown.stdout, re.MULTILINE)
        code = f"import sys; from cluster.cli import main; main([{command!r}, '--help'])"
        looked = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {code}"
        helped = subprocess.run([sys.executable, "-c", looked], cwd=CHECKOUT, capture_output=True, text=True)
        assert "paceline " + command in helped.stdout
        assert not {"torch", "transformers", "ray", "grpc"} & set(helped.stderr.split())
