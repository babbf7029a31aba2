"""Models by their commits: read from the hub's cache on this machine, without asking a hub."""

from dataclasses import replace

import pytest

from cluster.config import checks
from cluster.config.checks import CheckError, check_model, check_tokenizer
from cluster.config.config import Override, from_mapping, load
from cluster.config.serving import target_settings
from engine.settings import EngineSettings
from tests.bundled import MODELS
from tests.cluster.processes import Paceline
from tests.ports import free_port

COMMIT = "0123456789abcdef" * 2 + "01234567"
OTHER = COMMIT[::-1]
TARGET = MODELS / "target"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub's cache with the bundled target as ``Org/Name`` of one commit."""
    snapshot = tmp_path / "models--Org--Name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in TARGET.iterdir():
        (snapshot / file.name).symlink_to(file)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return snapshot


@pytest.mark.parametrize("key", ["target.model", "draft.model", "draft.target_tokenizer", "router.tokenizer"])
def test_a_commit_that_was_fetched_is_its_folder(cache, tmp_path, key):
    section, _, name = key.partition(".")
    file = tmp_path / "paceline.yaml"
    file.write_text(f"{section}: {{{name}: Org/Name@{COMMIT}}}\n")
    for config in (load(file), load(None, [Override(key, f"Org/Name@{COMMIT}", "--set")])):
        assert getattr(getattr(config, section), name) == str(cache)


def test_its_commit_is_no_part_of_its_name(cache):
    config = from_mapping({"target": {"model": f"Org/Name@{COMMIT}"}}, "test")
    check_model(config.target.model, "--target")
    check_tokenizer(config.target.model)
    engine = target_settings(config).engine
    assert (engine.model, engine.served_name) == (str(cache), "Name")
    assert replace(engine, name="mine").served_name == "mine"
    assert EngineSettings(str(TARGET)).served_name == "target"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (f"Org/Name@{OTHER}", f"no such commit; fetch it: `hf download Org/Name --revision {OTHER}`"),
        (f"Org/Other@{COMMIT}", f"no such commit; fetch it: `hf download Org/Other --revision {COMMIT}`"),
        ("Org/Name@main", "'main' is no commit; give its 40 digits, as the hub lists under History"),
        ("Org/Name@", "'' is no commit; give its 40 digits, as the hub lists under History"),
    ],
)
def test_what_was_not_fetched_is_refused_with_the_setting_and_the_remedy(cache, given, message):
    config = from_mapping({"target": {"model": given}}, "test")
    for check in (lambda: check_model(config.target.model, "--target"), lambda: check_tokenizer(given)):
        with pytest.raises(CheckError) as caught:
            check()
        assert str(caught.value).endswith(message)
        assert given in str(caught.value)
    assert config.target.model == given


def test_a_folder_with_such_a_name_is_a_folder(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Org" / f"Name@{COMMIT}"
    folder.mkdir(parents=True)
    assert from_mapping({"target": {"model": f"Org/Name@{COMMIT}"}}, "test").target.model == str(folder)


def test_a_worker_loads_it_without_a_network(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    worker = ["worker", "target", "--model", f"Org/Name@{COMMIT}", "--threads", "1", "--listen"]
    with Paceline(*worker, f"127.0.0.1:{free_port()}") as running:
        assert running.expect(r"target worker ready on \S+ \((\S+), ") == str(cache)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        (lambda folder: {"target": {"model": folder}, "draft": {"replicas": 0}}, "--target"),
        (lambda folder: {"models": {"other": {"target": {"model": folder}}}}, "models.other.target.model"),
        (lambda folder: {"router": {"tokenizer": folder}}, "router.tokenizer"),
    ],
)
def test_where_a_tokenizer_is_missing_it_is_said_what_names_the_folder(tmp_path, sections, named):
    (tmp_path / "config.json").write_bytes((TARGET / "config.json").read_bytes())
    with pytest.raises(CheckError) as caught:
        checks.check(from_mapping(sections(str(tmp_path)) | {"ray": {"address": "auto"}}, "test"))
    instead = "set router.tokenizer to a folder that has one"
    assert str(caught.value) == f"{named} {tmp_path}: has no tokenizer.json; {instead}"
