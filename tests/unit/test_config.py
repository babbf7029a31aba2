from dataclasses import fields

import pytest
import yaml

from cluster.config import SECTIONS, Config, ConfigError, Override, chosen_threads, default_of, load, rule_of


def written(tmp_path, text: str):
    path = tmp_path / "paceline.yaml"
    path.write_text(text)
    return path


def test_the_bundled_pair_is_the_default():
    config = load()
    assert config.target.model.endswith("models/target")
    assert config.draft.model.endswith("models/draft")
    assert (config.backend, config.router.host, config.router.port, config.drafts) == ("ray", "127.0.0.1", 8000, 1)


def test_the_file_is_read_and_flags_win_over_it(tmp_path):
    path = written(tmp_path, "backend: local\ntarget: {replicas: 2, threads: 3}\nrouter: {port: 9000}\n")
    config = load(path, [Override("router.port", "9001", "--port"), Override("router.port", "9002", "--port")])
    assert (config.backend, config.target.replicas, config.target.threads, config.router.port) == ("local", 2, 3, 9002)


def test_what_is_printed_can_be_read_again(tmp_path):
    config = load(None, [Override("target.cache_tokens", "4096", "--set"), Override("ray.address", "auto", "--set")])
    assert load(written(tmp_path, config.to_yaml())) == config


def test_threads_are_auto_or_a_number(tmp_path):
    config = load(written(tmp_path, "target: {threads: 3}\ndraft: {threads: auto}\n"))
    assert (config.target.threads, config.draft.threads) == (3, "auto")
    assert (chosen_threads(config.target), chosen_threads(config.draft)) == (3, 1)
    assert load(written(tmp_path, config.to_yaml())) == config
    assert load(None, [Override("target.threads", "4", "--threads")]).target.threads == 4
    assert load(None, [Override("target.threads", "auto", "--threads")]) == load()


def test_an_empty_file_and_empty_sections_change_nothing(tmp_path):
    assert load(written(tmp_path, "")) == load(written(tmp_path, "target:\n")) == load()


def test_without_speculation_there_are_no_drafters():
    assert load(None, [Override("speculation.enabled", "false", "--no-speculation")]).drafts == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("target: {dtpye: fp32}", "unknown setting 'target.dtpye'; did you mean 'target.dtype'?"),
        ("tarqet: {dtype: fp32}", "unknown setting 'tarqet'; did you mean 'target'?"),
        ("port: 8001", "unknown setting 'port'; did you mean 'router.port'?"),
        ("backed: local", "did you mean 'backend'?"),
        ("xyzzy: 1", "unknown setting 'xyzzy'; sections are target, draft, router, speculation, ray"),
        ("1: 2", "unknown setting '1'"),
        ("router: {port: '8001'}", "router.port must be a whole number from 1 to 65535, got '8001'"),
        ("router: {port: 0}", "router.port must be a whole number from 1 to 65535, got 0"),
        ("router: {port: true}", "router.port must be a whole number from 1 to 65535, got True"),
        ("router: {port: 80.5}", "router.port must be a whole number from 1 to 65535, got 80.5"),
        ("router: {port: }", "router.port must be a whole number from 1 to 65535, got nothing"),
        ("router: {allow_remote: 1}", "router.allow_remote must be true or false, got 1"),
        ("start_timeout: .nan", "start_timeout must be a number from 1 to 86400, got nan"),
        ("target: {dtype: int3}", "target.dtype must be one of auto, bfloat16"),
        ("draft: {quantization: int4}", "draft.quantization must be one of none, int8, int8-dynamic, fp8, got 'int4'"),
        ("target: {model: [a]}", "target.model must be text, got a list"),
        ("target: {threads: 0}", "target.threads must be auto or a whole number from 1 to 1024, got 0"),
        ("target: {threads: true}", "target.threads must be auto or a whole number from 1 to 1024, got True"),
        ("draft: {threads: many}", "draft.threads must be auto or a whole number from 1 to 1024, got 'many'"),
        ("target: fast", "target must be a mapping of settings, got 'fast'"),
        ("- target", "must be a mapping of settings, got a list"),
        ("target: {", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_with_what_would_be_right(tmp_path, text, words):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("router.port", "abc", "--x: router.port must be a whole number from 1 to 65535, got 'abc'"),
        ("draft.threads", "many", "--x: draft.threads must be auto or a whole number from 1 to 1024, got 'many'"),
        ("draft.threads", "0", "--x: draft.threads must be auto or a whole number from 1 to 1024, got 0"),
        ("router.prot", "1", "--x: unknown setting 'router.prot'; did you mean 'router.port'?"),
        ("ray.cpus_per_worker", "-1", "--x: ray.cpus_per_worker must be a number from 0 to 1024, got -1.0"),
        ("speculation.enabled", "perhaps", "--x: speculation.enabled must be true or false, got 'perhaps'"),
    ],
)
def test_a_bad_flag_is_refused_by_its_name(key, text, words):
    with pytest.raises(ConfigError) as caught:
        load(None, [Override(key, text, "--x")])
    assert str(caught.value) == words


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.yaml")


def test_folders_are_meant_relative_to_what_names_them(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    file = written(tmp_path, "target: {model: m}\ndraft: {model: Org/Name}\n")
    config = load(file)
    assert (config.target.model, config.draft.model) == (str(tmp_path / "m"), "Org/Name")
    monkeypatch.chdir(tmp_path)
    assert load(None, [Override("draft.model", "./m", "--draft")]).draft.model == str(tmp_path / "m")


def test_every_setting_says_what_it_is_and_has_a_default_of_its_own_kind():
    printed = yaml.safe_load(Config().to_yaml())
    keys = [key for key in printed if key not in SECTIONS]
    keys += [f"{section}.{entry.name}" for section, kind in SECTIONS.items() for entry in fields(kind)]
    for key in keys:
        assert rule_of(key).about
        override = Override(key, str(default_of(key)), "--set")
        assert load(None, [override]) == Config()
