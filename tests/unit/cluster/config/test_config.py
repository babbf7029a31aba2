from dataclasses import fields

import pytest
import yaml

from cluster.config.checks import CheckError, check_heads
from cluster.config.config import SECTIONS, SETTINGS, Config, Override, from_mapping, load
from cluster.config.flags import Parser, add_file, add_repeated, add_section, add_tracing, configuration
from cluster.config.pools import OWN, DraftConfig, ModelConfig, TargetConfig, chosen_threads
from cluster.config.serving import draft_settings, router_settings, shared_drafter, target_settings, trace_settings
from cluster.config.settings import ConfigError
from speculation.events import Role
from transport.tracing import TraceSettings


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


def test_workers_check_their_books_where_the_configuration_says_so(tmp_path):
    for config, wanted in ((load(), False), (load(written(tmp_path, "validate: true\n")), True)):
        assert (target_settings(config).validate, draft_settings(config).validate) == (wanted, wanted)


def test_without_speculation_there_are_no_drafters():
    assert load(None, [Override("speculation.enabled", "false", "--no-speculation")]).drafts == 0


def test_a_mapping_may_take_over_several_others(tmp_path):
    text = "router: {<<: &a {port: 1}, <<: &b {host: localhost}, replicas: 1}"
    assert load(written(tmp_path, text)).router.host == "localhost"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("target: {dtpye: fp32}", "unknown setting 'target.dtpye'; did you mean 'target.dtype'?"),
        ("tarqet: {dtype: fp32}", "unknown setting 'tarqet'; did you mean 'target'?"),
        ("target: {medusa: ./heads}", "unknown setting 'target.medusa'; "),
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
        ("router: {port: 1}\ntarget: {}\nrouter: {host: h}", "is not YAML: 'router' is given twice"),
        ("router: {port: 1, port: 2}", "is not YAML: 'port' is given twice"),
        ("draft: {placement: here}", "draft.placement must be one of auto, own, shared, cpu, got 'here'"),
        ("draft: {placement: cpu, device: 'cuda:1'}", "draft.placement is cpu, but its device is cuda:1"),
        (
            "draft: {placement: shared, assistant: /m}",
            "draft.placement is shared, which draft.assistant cannot be used",
        ),
        ("draft: {placement: shared, target_tokenizer: /m}", "which draft.target_tokenizer cannot be used with"),
        ("draft: {placement: shared, tensor_parallel_size: 2}", "but draft.tensor_parallel_size is 2"),
        (
            "models: {a: {drafts: {b: {placement: shared}, c: {placement: shared}}}}",
            "models.a has 2 draft pools with placement shared; a target has one",
        ),
        ("models: {a: {drafts: {b: {placement: cpu, device: cuda}}}}", "models.a.drafts.b.placement is cpu"),
        ("models: [a]", "models must be a mapping of settings, got a list"),
        ("models: {a: 3}", "models.a must be a mapping of settings, got 3"),
        ("models: {3: {}}", "models has a name 3; a name there is made of letters, digits and . _ - : /"),
        ("models: {a b: {}}", "models has a name 'a b'; a name"),
        ("models: {a: {draft: {}}}", "unknown setting 'models.a.draft'; did you mean 'drafts'?"),
        ("models: {a: {target: 3}}", "models.a.target must be a mapping of settings, got 3"),
        (
            "models: {a: {target: {gpsu: 1}}}",
            "unknown setting 'models.a.target.gpsu'; did you mean 'models.a.target.gpus'?",
        ),
        ("models: {a: {target: {name: b}}}", "models.a.target.name is 'b'; the key 'a' is the name"),
        ("models: {a: {drafts: [small]}}", "models.a.drafts must be a mapping of settings, got a list"),
        ("models: {a: {drafts: {Big One: {}}}}", "models.a.drafts has a name 'Big One'; a name there is made of lower"),
        (
            "models: {llama-8b: {drafts: {small: {replicas: many}}}}",
            "models.llama-8b.drafts.small.replicas must be a whole number from 0 to 1024, got 'many'",
        ),
        ("models: {a/b: {}, a-b: {}}", "models 'a/b' and 'a-b' differ only in / : -; rename one of them"),
        ("models.a.target.gpus: 1", "unknown setting 'models.a.target.gpus'"),
        ("{models: {a: {}}, router: {model_name: b}}", "router.model_name is 'b'; leave it empty, the keys of models"),
        ("target: {labels: zone}", "target.labels must be labels such as paceline.io/role=router, zone=a, got 'zone'"),
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
        ("ray.placement_timeout", "inf", "--x: ray.placement_timeout must be a number from 1 to 86400, got inf"),
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
    file = written(tmp_path, "target: {model: m}\ndraft: {model: Org/Name, assistant: m}\n")
    config = load(file)
    assert (config.target.model, config.draft.model) == (str(tmp_path / "m"), "Org/Name")
    assert config.draft.assistant == str(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    assert load(None, [Override("draft.model", "./m", "--draft")]).draft.model == str(tmp_path / "m")


def test_a_model_that_is_a_link_is_called_as_the_link_and_loaded_from_where_that_leads(tmp_path, monkeypatch):
    """Now, and not where it leads when some worker starts again."""
    made, link = tmp_path / "run-9f8e", tmp_path / "llama-8b"
    made.mkdir()
    link.symlink_to(made)
    monkeypatch.chdir(tmp_path)
    by_flag = [Override("target.model", "./llama-8b/", "--target")]
    for config in (load(written(tmp_path, "target: {name: '', model: llama-8b}")), load(None, by_flag)):
        assert target_settings(config).engine.served_name == "llama-8b"
        assert config.target.model == str(made)
        assert from_mapping(yaml.safe_load(config.to_yaml()), "again") == config
    named = written(tmp_path, "target: {name: mine, model: llama-8b}")
    assert load(named).target.name == "mine"
    assert load(named, [Override("target.name", "yours", "-"), *by_flag]).target.name == "yours"
    file = written(tmp_path, "target: {model: llama-8b}")
    assert load(file, [Override("target.model", "run-9f8e", "--target")]).target.name == ""
    assert (
        load(written(tmp_path, "models: {llama: {target: {model: llama-8b}}}")).models["llama"].target.name == "llama"
    )


def test_every_setting_says_what_it_is_and_has_a_default_of_its_own_kind():
    printed = yaml.safe_load(Config().to_yaml())
    keys = [key for key in printed if key not in (*SECTIONS, "models")]
    keys += [f"{section}.{entry.name}" for section, kind in SECTIONS.items() for entry in fields(kind)]
    for key in keys:
        assert SETTINGS[key].about
        override = Override(key, str(SETTINGS[key].default), "--set")
        assert load(None, [override]) == Config()


MODELS = """\
target: {dtype: fp32, replicas: 2}
draft: {threads: 2}
models:
  llama-3.1-8b:
    target: {gpus: 1, tensor_parallel_size: 2, gpu_class: large}
    drafts:
      small: {replicas: 4, gpu_class: small}
      tiny:
  Org/Other:
    target: {replicas: 5}
  plain:
    drafts: {}
"""


def test_models_are_pools_with_the_sections_as_defaults(tmp_path):
    config = load(written(tmp_path, MODELS), [Override("models.llama-3.1-8b.drafts.tiny.replicas", "3", "--set")])
    assert load(written(tmp_path, config.to_yaml())) == config
    assert [(pool.path, pool.deployment, str(pool)) for pool in config.pools()] == [
        ("models.llama-3.1-8b.target", "TargetWorker-llama-3.1-8b", "target of llama-3.1-8b"),
        (
            "models.llama-3.1-8b.drafts.small",
            "DraftWorker-llama-3.1-8b.small",
            "draft small of llama-3.1-8b",
        ),
        ("models.llama-3.1-8b.drafts.tiny", "DraftWorker-llama-3.1-8b.tiny", "draft tiny of llama-3.1-8b"),
        ("models.Org/Other.target", "TargetWorker-Org-Other", "target of Org/Other"),
        ("models.Org/Other.drafts.draft", "DraftWorker-Org-Other.draft", "draft draft of Org/Other"),
        ("models.plain.target", "TargetWorker-plain", "target of plain"),
    ]
    first, small, tiny, second, *_ = (pool.settings for pool in config.pools())
    assert (first.name, first.dtype, first.replicas, first.gpus) == ("llama-3.1-8b", "fp32", 2, 1)
    assert (small.threads, small.replicas, small.gpu_class) == (2, 4, "small")
    assert (tiny.threads, tiny.replicas, tiny.gpu_class) == (2, 3, "")
    assert (second.name, second.replicas, second.gpus) == ("Org/Other", 5, 0)
    assert config.drafts == 4 + 3 + 1


def test_without_models_there_is_one_of_the_two_sections():
    config = load(None, [Override("draft.replicas", "0", "--set")])
    assert [(pool.path, pool.deployment, pool.settings.replicas) for pool in config.pools()] == [
        ("target", "TargetWorker", 1),
        ("draft", "DraftWorker", 0),
    ]
    assert [pool.role for pool in load(None, [Override("speculation.enabled", "no", "-")]).pools()] == [Role.TARGET]


def test_a_worker_of_a_pool_finds_its_settings_where_a_single_model_has_them(tmp_path):
    config = load(written(tmp_path, MODELS))
    small = config.pools()[1]
    alone = config.of_worker(small)
    assert (alone.draft, alone.models, alone.target) == (small.settings, {}, config.pools()[0].settings)


def test_a_worker_of_a_pool_that_reads_its_settings_from_a_file_finds_them_there(tmp_path):
    """What the section `target` says of heads that draft away from it is nothing of other models."""
    away = {"eagle": "/heads/h", "eagle_at": "drafter"}
    plain = {"target": {"model": "/m/plain", "eagle": ""}, "drafts": {"draft": {"model": "/m/small"}}}
    config = from_mapping({"target": away, "models": {"plain": plain}}, "here")
    for pool in config.pools():
        alone = config.of_worker(pool)
        assert load(written(tmp_path, alone.to_yaml())) == alone


def test_a_place_for_a_head_that_is_not_there_is_refused():
    away = {"eagle_at": "drafter"}
    with pytest.raises(ConfigError, match=r"^settings: target.eagle_at is drafter, but there is no head; "):
        load(None, [Override("target.eagle_at", "drafter", "--eagle-at")])
    with pytest.raises(ConfigError, match=r"^here: models.a.target.eagle_at is drafter, but there is no head; "):
        from_mapping({"models": {"a": {"target": away}}}, "here")
    by_default = {"target": away, "models": {"a": {"target": {"eagle": "/heads/h"}}, "b": {}}}
    found = {name: model.target.eagle_at for name, model in from_mapping(by_default, "here").models.items()}
    assert found == {"a": "drafter", "b": "target"}


def test_a_draft_model_may_work_in_its_targets_process(tmp_path):
    """Then there are no draft workers, and the target's are told of it."""
    config = load(None, [Override("draft.placement", "shared", "--draft-placement")])
    (target,) = config.pools()
    assert (target.role, config.drafts, config.shared_draft(target)) == (Role.TARGET, 0, config.draft)
    assert load(written(tmp_path, config.to_yaml())) == config
    assert config.of_worker(target).draft == config.draft
    assert shared_drafter(config.of_worker(target)) is not None
    assert shared_drafter(load().of_worker(target)) is None
    for key in ("speculation.enabled", "speculation.drafters"):
        without = load(None, [Override("draft.placement", "shared", "-"), Override(key, "no", "-")])
        assert without.shared_draft(target) is None and shared_drafter(without.of_worker(target)) is None


def test_each_model_places_its_drafts(tmp_path):
    document = (
        "draft: {placement: shared}\nmodels: {a: {drafts: {one: {threads: 2}}}, b: {drafts: {two: {placement: own}}}}"
    )
    config = load(written(tmp_path, document))
    a, b, two = config.pools()
    shared = config.shared_draft(a)
    assert (a.model, b.model, two.name, config.shared_draft(b)) == ("a", "b", "two", None)
    assert shared is not None and shared.threads == 2
    assert config.of_worker(a).draft == shared
    assert shared_drafter(config.of_worker(b)) is None


def test_drafting_on_cpus_is_a_device():
    assert load(None, [Override("draft.placement", "cpu", "-")]).draft.device == "cpu"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("models.llama-3.1-8b.target.gpsu", "did you mean 'models.llama-3.1-8b.target.gpus'?"),
        ("models.unknown.target.gpus", "the targets are models.llama-3.1-8b.target, models.Org/Other.target, models.p"),
    ],
)
def test_a_flag_for_a_pool_that_is_not_there_is_refused(tmp_path, key, words):
    with pytest.raises(ConfigError, match=r"^--set: ") as caught:
        load(written(tmp_path, MODELS), [Override(key, "1", "--set")])
    assert words in str(caught.value)


def test_origins_are_gathered_from_flags_and_checked(tmp_path):
    parser = Parser()
    add_repeated(parser, "--cors-origin", "admission.cors_origins")
    add_section(parser, "admission", without=("cors_origins",))
    add_tracing(parser)
    add_file(parser)
    path = written(tmp_path, "admission: {cors_origins: 'https://old.example', request_timeout: 5}\n")
    one, two = "--cors-origin", "https://a.example"
    given = parser.parse_args(
        ["--config", str(path), one, two, "--max-request-timeout", "9", one, "http://b.example:80"]
    )
    settings = router_settings(configuration(given)).api.admission
    assert settings.cors_origins == ("https://a.example", "http://b.example:80")
    assert (settings.timeout, settings.max_timeout) == (5.0, 9.0)
    assert router_settings(configuration(parser.parse_args([one, "*"]))).api.admission.cors_origins == ("*",)
    assert router_settings(configuration(parser.parse_args([]))).api.admission.cors_origins == ()
    for bad in ("app.example", "https://a.example/path", "https://a.example, *"):
        with pytest.raises(ConfigError, match=r"admission\.cors_origins must be \* or origins such as"):
            configuration(parser.parse_args([one, bad]))


def test_tracing_is_off_unless_asked_for():
    assert trace_settings(load()) is None
    assert trace_settings(load(None, [Override("tracing.enabled", "true", "--tracing")])) == TraceSettings()
    there = load(None, [Override("tracing.otlp_endpoint", "http://localhost:4317", "--otlp-endpoint")])
    assert trace_settings(there) == TraceSettings("http://localhost:4317")
    with pytest.raises(ConfigError, match=r"tracing\.otlp_endpoint must be an address such as http"):
        load(None, [Override("tracing.otlp_endpoint", "localhost:4317", "--otlp-endpoint")])


def test_spans_go_where_opentelemetry_is_told_unless_we_are(monkeypatch):
    enabled = Override("tracing.enabled", "true", "--tracing")
    for variable in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.setenv(variable, f"http://{variable}:4317")
        assert trace_settings(load(None, [enabled])) == TraceSettings(f"http://{variable}:4317")
    there = Override("tracing.otlp_endpoint", "http://collector:4317", "--otlp-endpoint")
    assert trace_settings(load(None, [enabled, there])) == TraceSettings("http://collector:4317")


def test_a_router_may_read_the_tokenizers_of_its_targets_and_no_others():
    assert router_settings(Config()).models == [Config().target.model]
    pools = {
        "large": ModelConfig(TargetConfig(model="./large"), {"": DraftConfig(model="./draft")}),
        "small": ModelConfig(TargetConfig(model="Org/Small")),
    }
    assert router_settings(Config(models=pools)).models == ["./large", "Org/Small"]


def test_a_router_is_told_of_its_models_where_there_are_several():
    several = {"large": ModelConfig(TargetConfig()), "small": ModelConfig(TargetConfig())}
    assert router_settings(Config(models=several)).limits.models == ("large", "small")
    assert router_settings(Config(models={"large": ModelConfig(TargetConfig())})).limits.models == ()
    assert router_settings(Config()).limits.models == ()


def test_an_eagle_head_that_drafts_away_from_its_target_is_what_draft_workers_have() -> None:
    config = from_mapping({"target": {"model": "t", "eagle": "h", "eagle_at": "drafter"}}, "here")
    (target, draft) = config.pools()
    assert (draft.settings.model, draft.settings.eagle) == (config.target.model, config.target.eagle)
    assert isinstance(draft.settings, DraftConfig) and draft.settings.placement == OWN
    assert target_settings(config.of_worker(target)).engine.eagle_away
    assert not draft_settings(config.of_worker(draft)).engine.eagle_away
    assert not from_mapping({"target": {"eagle": "h"}}, "here").draft.eagle


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"speculation": {"drafters": False}}, "target.eagle_at is drafter, but speculation.drafters is false"),
        ({"draft": {"replicas": 0}}, "target.eagle_at is drafter, but there are no draft workers"),
        ({"models": {"a": {"drafts": {}}, "b": {}}}, "models.a.target.eagle_at is drafter, but there are no"),
        ({"draft": {"replicas": 0, "max_replicas": 2}}, ""),
        ({"speculation": {"enabled": False}}, ""),
        ({"target": {"eagle": "h"}, "draft": {"replicas": 0}}, ""),
        ({}, ""),
    ],
)
def test_an_eagle_head_that_nobody_would_draft_with_is_refused(document, words) -> None:
    config = from_mapping({"target": {"eagle": "h", "eagle_at": "drafter"}} | document, "here")
    if words:
        with pytest.raises(CheckError, match=f"^{words}"):
            check_heads(config)
    else:
        check_heads(config)


def test_an_eagle_head_of_a_draft_worker_cannot_share_the_targets_process() -> None:
    shared = {"target": {"eagle": "h", "eagle_at": "drafter"}, "draft": {"placement": "shared"}}
    with pytest.raises(ConfigError, match=r"draft.placement is shared, which draft.eagle cannot be used with"):
        from_mapping(shared, "here")


def test_pools_of_models_take_the_section_as_it_is_given_and_what_follows_from_their_own_target() -> None:
    """What the section `draft` would become beside the section `target` is none of theirs."""
    away = {"eagle": "/heads/h", "eagle_at": "drafter"}
    models = {
        "llama": {"target": {"model": "/m/llama"}},
        "qwen": {"target": {"model": "/m/qwen", "eagle": "/heads/q"}},
        "plain": {"target": {"model": "/m/plain", "eagle": ""}, "drafts": {"draft": {"model": "/m/small"}}},
    }
    made = from_mapping({"target": away, "models": models}, "here").models
    drafts = {name: (model.drafts["draft"].model, model.drafts["draft"].eagle) for name, model in made.items()}
    assert drafts == {"llama": ("/m/llama", "/heads/h"), "qwen": ("/m/qwen", "/heads/q"), "plain": ("/m/small", "")}
    pools = {"fast": {"placement": "own", "gpus": 1}, "slow": {}}
    cpu = {"draft": {"placement": "cpu"}, "models": {"a": {"target": {"model": "/m/a"}, "drafts": pools}}}
    found = from_mapping(cpu, "here").models["a"].drafts
    assert {name: draft.device for name, draft in found.items()} == {"fast": "auto", "slow": "cpu"}
    shared = {"draft": {"placement": "shared", "assistant": "/m/x"}}
    own = {"models": {"a": {"target": {"model": "/m/a"}, "drafts": {"fast": {"placement": "own"}}}}}
    assert from_mapping(shared | own, "here").models["a"].drafts["fast"].assistant == "/m/x"
