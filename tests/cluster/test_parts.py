"""Pieces of the Ray side that need no Ray: room for replicas, reasons in tracebacks, directories."""

import asyncio
import copy
import json
import re
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from ray.serve import context
from ray.serve.config import HTTPOptions
from ray.serve.schema import ServeDeploySchema

from cluster.config.checks import CheckError, check_ranks
from cluster.config.config import Override, from_mapping, load
from cluster.config.security import SecurityError
from cluster.config.serving import router_settings
from cluster.console import CommandError
from cluster.discovery import ServeDirectory, StaticDirectory
from cluster.placement import GPU_CLASS, ClusterNode, Need, lacking, needs
from cluster.ray import connection, replicas
from cluster.ray.cluster import reason_in
from cluster.ray.parts import LOCAL_DRAIN_SECONDS, SETTINGS, STOP_SECONDS, declaration, known, options, outline
from cluster.serve_app import build
from router.sessions.choice import StandbyTargets
from speculation.events import Role


def needs_with(flags: dict[str, str]) -> dict[str, Need]:
    config = load(None, [Override(key, text, "--set") for key, text in flags.items()])
    return {need.name: need for need in needs(config)}


LARGE, SMALL = {GPU_CLASS: "large"}, {GPU_CLASS: "small"}


def test_needs_follow_the_configuration():
    flags = {"target.gpus": "2", "target.gpu_class": "large", "draft.replicas": "3", "router.replicas": "2"}
    found = needs_with(flags)
    assert found["target"] == Need("target", 1, 0.1, 2.0, LARGE, deployment="TargetWorker")
    assert (found["draft"].replicas, found["router"].replicas) == (3, 2)
    options = found["target"].deployment_options({"A": "b"})
    runtime = {"env_vars": {"A": "b"}}
    actor = {"num_cpus": 0.1, "num_gpus": 2.0, "runtime_env": runtime, "label_selector": LARGE}
    assert options == {"num_replicas": 1, "ray_actor_options": actor}
    assert "label_selector" not in found["draft"].deployment_options({})["ray_actor_options"]


def test_ranks_are_a_group_on_one_node_and_rank_0_is_its_first_bundle():
    flags = {"target.tensor_parallel_size": "2", "target.gpus": "1", "target.gpu_class": "large"}
    found = needs_with(flags)
    assert (found["target"].ranks, found["draft"].ranks) == (2, 1)
    options = found["target"].deployment_options({})
    assert options["placement_group_bundles"] == [{"CPU": 0.1, "GPU": 1.0}] * 2
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert options["placement_group_bundle_label_selector"] == [LARGE] * 2
    assert options["ray_actor_options"] == {"num_cpus": 0.1, "num_gpus": 1.0, "runtime_env": {"env_vars": {}}}


@pytest.mark.parametrize(
    ("flags", "hidden"),
    [
        ({}, True),
        ({"draft.gpus": "0.5"}, False),
        ({"draft.device": "cuda"}, False),
        ({"ray.address": "local"}, False),
    ],
)
def test_on_a_cluster_who_reserves_no_gpu_sees_none(flags, hidden):
    config = load(None, [Override(key, text, "--set") for key, text in ({"ray.address": "auto"} | flags).items()])
    (draft,) = (pool for pool in config.pools() if pool.role is Role.DRAFT)
    environment = options(config, draft)["ray_actor_options"]["runtime_env"]["env_vars"]
    assert environment.get("CUDA_VISIBLE_DEVICES") == ("" if hidden else None)


@pytest.mark.parametrize(("address", "routers"), [("auto", 700.0), ("local", LOCAL_DRAIN_SECONDS)])
def test_serve_ends_a_replica_no_sooner_than_its_streams_may_go_on(address, routers):
    document = {"ray": {"address": address}, "router": {"drain_timeout": 700}, "drain_timeout": 90}
    config = from_mapping(document, "args")
    for pool in config.pools():
        assert options(config, pool)["graceful_shutdown_timeout_s"] == 90 + STOP_SECONDS
    assert options(config, None)["graceful_shutdown_timeout_s"] == routers


def test_without_speculation_nothing_is_needed_for_drafts():
    assert "draft" not in needs_with({"speculation.enabled": "false"})


MODELS = {
    "router": {"labels": "paceline.io/role=router", "replicas": 3},
    "models": {
        "a": {"target": {"gpus": 1, "gpu_class": "large", "labels": "zone=x, rack=7"}},
        "b": {"target": {"replicas": 2}, "drafts": {"one": {"replicas": 2}, "none": {"replicas": 0}}},
    },
}


def test_every_pool_of_every_model_is_placed_by_its_labels():
    wanted = needs(from_mapping(MODELS, "args"))
    assert [(need.deployment, need.replicas) for need in wanted] == [
        ("TargetWorker-a", 1),
        ("DraftWorker-a.draft", 1),
        ("TargetWorker-b", 2),
        ("DraftWorker-b.one", 2),
        ("Router", 3),
    ]
    assert wanted[0].labels == LARGE | {"zone": "x", "rack": "7"}
    assert wanted[-1].labels == {"paceline.io/role": "router"}
    reason = lacking(
        wanted, [ClusterNode(4, 2, LARGE | {"zone": "x"}), ClusterNode(4, 2, {"paceline.io/role": "router"})]
    )
    assert reason is not None
    assert re.match(r"no Ray node has the label for 1 x target of a with .*, label zone=x, label rack=7 each", reason)


def test_what_is_deployed_is_the_configuration_and_replicas_stand_apart():
    """So that Serve does not replace running workers when only their number changes."""
    config = from_mapping(MODELS, "args")
    described = declaration(config)
    assert json.loads(json.dumps(described)) == described
    more = {"models": MODELS["models"] | {"a": {"target": MODELS["models"]["a"]["target"] | {"replicas": 7}}}}
    changed = declaration(from_mapping(MODELS | more, "args"))
    assert changed["args"] == described["args"]
    assert [entry["num_replicas"] for entry in changed["deployments"]] == [7, 1, 2, 2, 3]
    assert replaced(described, changed) == set()
    again = from_mapping(described["args"], "args")
    assert [need.deployment for need in needs(again)] == [need.deployment for need in needs(config)]
    ServeDeploySchema.model_validate({"applications": [described]})


def test_targets_that_stand_by_are_replicas_more_and_routers_know_how_many():
    before, after = (
        declaration(from_mapping({"target": {"replicas": 2, "standby": count}}, "args")) for count in (0, 1)
    )
    assert [entry["num_replicas"] for entry in before["deployments"]] == [2, 1, 1]
    assert [entry["num_replicas"] for entry in after["deployments"]] == [3, 1, 1]
    assert replaced(before, after) == {"Router"}
    told = json.loads(after["deployments"][-1]["ray_actor_options"]["runtime_env"]["env_vars"][SETTINGS])
    config = from_mapping(told, "told")
    assert router_settings(config).limits.standby == {"": StandbyTargets(active=2, idle=1)}


def replaced(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The deployments whose replicas Serve replaces, by the rules of its DeploymentVersion."""
    kinds = [{entry["name"]: entry for entry in described["deployments"]} for described in (before, after)]
    if any(before[key] != after[key] for key in ("import_path", "args", "runtime_env")):
        return {*kinds[0], *kinds[1]}

    def restarts(name: str) -> bool:
        told = ("ray_actor_options", *(key for key in kinds[1][name] if key.startswith("placement_group")))
        return any(kinds[0][name].get(key) != kinds[1][name].get(key) for key in told)

    return {name for name in kinds[0] if restarts(name)}


WORKERS_A, WORKERS_B = {"TargetWorker-a", "DraftWorker-a.draft"}, {"TargetWorker-b", "DraftWorker-b.one"}


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("models.a.target.max_running", 7, {"TargetWorker-a"}),
        ("models.a.target.tensor_parallel_size", 2, {"TargetWorker-a"}),
        ("models.a.target.model", "/models/other", WORKERS_A | {"Router"}),
        ("models.b.drafts.one.model", "/models/other", {"DraftWorker-b.one"}),
        ("models.a.target.standby", 1, {"Router"}),
        ("target.step_tokens", 64, {"TargetWorker-a", "TargetWorker-b"}),
        ("router.max_sessions", 9, {"Router"}),
        ("router.allow_remote", True, WORKERS_A | WORKERS_B | {"Router"}),
        ("admission.concurrent_requests", 9, {"Router"}),
        ("start_timeout", 99, set()),
        ("autoscaling.load", 0.5, set()),
        ("validate", True, WORKERS_A | WORKERS_B),
        ("drain_timeout", 9, WORKERS_A | WORKERS_B | {"Router"}),
        ("speculation.drafters", False, WORKERS_A | WORKERS_B | {"Router"}),
    ],
)
def test_a_change_replaces_only_whom_it_concerns(path, value, expected):
    """Where there are drafters and where there are none are two applications."""
    *sections, name = path.split(".")
    changed = copy.deepcopy(MODELS)
    within = changed
    for section in sections:
        within = within.setdefault(section, {})
    within[name] = value
    before, after = (declaration(from_mapping(document, "args")) for document in (MODELS, changed))
    assert replaced(before, after) == expected


def test_a_draft_model_in_targets_processes_is_theirs():
    """No draft workers; another draft model replaces the targets, and nobody else."""
    before, after = (
        declaration(from_mapping({"draft": {"placement": "shared", "max_sessions": count}}, "args")) for count in (8, 9)
    )
    assert [entry["name"] for entry in before["deployments"]] == ["TargetWorker", "Router"]
    assert replaced(before, after) == {"TargetWorker"}


@pytest.mark.parametrize("document", [{"target": {"max_running": 7}, "draft": {"replicas": 0}}, MODELS])
def test_every_replica_finds_what_it_is_told_in_its_environment(monkeypatch, document):
    """And without that, as in a RayService, in what Serve was given for all."""
    config = from_mapping(document, "args")
    pools = {pool.deployment: pool for pool in config.pools()}
    for entry in declaration(config)["deployments"]:
        monkeypatch.setenv(SETTINGS, entry["ray_actor_options"]["runtime_env"]["env_vars"][SETTINGS])
        own = known(outline(config))
        (pool,) = [pool for pool in own.pools() if pool.deployment == entry["name"]] or [None]
        if pool is None:
            assert replace(own.router, replicas=config.router.replicas) == config.router
            told, right = own.pools(), config.pools()
            assert [(p.deployment, p.settings.name) for p in told] == [(p.deployment, p.settings.name) for p in right]
        else:
            original = pools[entry["name"]]
            assert replace(pool.settings, replicas=original.settings.replicas) == original.settings
            assert own.of_worker(pool).target.model == config.of_worker(original).target.model
    monkeypatch.delenv(SETTINGS)
    assert known(config) is config


def test_a_replacement_leaves_no_gap_of_routers_and_does_not_come_before_what_serves():
    """On a cluster that was started by others, a replica's own environment has to say so."""
    router = build(from_mapping({"ray": {"address": "auto"}}, "args"))._bound_deployment
    worker = router.init_args[1][0][1]._bound_deployment
    assert [one.name for one in (router, worker)] == ["Router", "TargetWorker"]
    assert router._deployment_config.max_surge_percent > 0
    assert worker._deployment_config.max_surge_percent == 0, "its successor needs its GPUs"
    for one in (router, worker):
        assert one.ray_actor_options["runtime_env"]["env_vars"]["RAY_worker_niceness"] == "0"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ([Need("draft", 1, 0.1, 1.0), Need("target", 2, 0.1, 1.0, LARGE)], None),
        ([Need("target", 1, 0.1, 1.0, {GPU_CLASS: "huge"})], "no Ray node has the label for 1 x target with 0.1 CPU"),
        ([Need("target", 3, 0.1, 1.0, LARGE)], "no room for 3 x target with 0.1 CPU, 1 GPU, label .*: only 2 fit"),
        ([Need("draft", 1, 0.1, 3.0)], "no room for 1 x draft with 0.1 CPU, 3 GPU each: only 0 fit"),
        ([Need("draft", 3, 0.1, 1.0), Need("target", 2, 0.1, 1.0, LARGE)], "no room for 3 x draft .*: only 1 fit"),
        ([Need("target", 1, 0.1, 1.0, LARGE, ranks=2), Need("draft", 1, 0.1, 1.0)], None),
        (
            [Need("target", 1, 0.1, 1.0, ranks=3)],
            "no room for 1 x target of 3 ranks on one node with 0.1 CPU, 1 GPU each: only 0 fit",
        ),
        ([Need("target", 2, 0.1, 1.0, ranks=2), Need("draft", 1, 0.1)], "no room for 2 x target .*: only 1 fit"),
        ([Need("target", 1, 2.0, ranks=3)], "no room for 1 x target of 3 ranks on one node with 2 CPU each"),
        ([Need("draft", 1, 0.1, 2.0), Need("target", 1, 0.1, 1.0, ranks=2)], "no room for .*: only 0 fit"),
        ([Need("router", 10, 0.1)], None),
        ([Need("router", 81, 0.1)], "only 80 fit"),
    ],
)
def test_what_a_cluster_lacks(wanted, words):
    nodes = [ClusterNode(4, 2, LARGE), ClusterNode(4, 1, SMALL)]
    reason = lacking(wanted, nodes)
    if words is None:
        assert reason is None
    else:
        assert reason is not None
        assert re.search(words, reason)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"draft.tensor_parallel_size": "2"}, None),
        ({"target.gpus": "0.5"}, None),
        ({"target.gpus": "0.5", "target.tensor_parallel_size": "2", "backend": "local"}, None),
        ({"target.gpus": "0.5", "target.tensor_parallel_size": "2"}, "target.gpus is 0.5, .* every rank needs a GPU"),
        ({"draft.tensor_parallel_size": "2", "ray.cpus_per_worker": "0"}, "draft.* reserve nothing in Ray"),
        ({"draft.tensor_parallel_size": "2", "ray.cpus_per_worker": "0", "draft.gpus": "1"}, None),
    ],
)
def test_ranks_that_ray_cannot_keep_together_or_apart_are_refused(flags, words):
    config = load(None, [Override(key, text, "--set") for key, text in flags.items()])
    if words is None:
        check_ranks(config)
    else:
        with pytest.raises(CheckError, match=words):
            check_ranks(config)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            "A replica failed to start with exception. Retrying 2 more time(s). Error:\n"
            "Traceback (most recent call last):\n  File x, line 1\n    raise\n"
            "ray.exceptions.RayTaskError(RuntimeError): \x1b[36mray::X\x1b[39m (pid=1)\n"
            "engine.model.ModelError: /m: the weights lack 9 tensors\n",
            "/m: the weights lack 9 tensors",
        ),
        ("engine.parallel.group.RankError: rank 1 of 2: process 7 died\n", "rank 1 of 2: process 7 died"),
        ("Error:\n  ValueError: first\n\nRuntimeError: last: one\nsome note", "RuntimeError: last: one"),
        ("it just failed", "it just failed"),
        ("", "no reason given; see Ray's logs"),
    ],
)
def test_the_reason_is_dug_out_of_a_traceback(message, reason):
    assert reason_in(message) == reason


def test_a_static_directory_tells_once():
    told = []
    StaticDirectory({Role.TARGET: ["a:1"], Role.DRAFT: []}).start(lambda role, found: told.append((role, list(found))))
    assert told == [(Role.TARGET, ["a:1"]), (Role.DRAFT, [])]


class FakeDeployment:
    """Answers what its replicas would, in turn; the last answer repeats."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def broadcast(self, method):
        assert method == "endpoint"
        return self

    async def results_async(self, timeout_s):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class FakeSubscription:
    """Pushes what the test says."""

    made: ClassVar[list["FakeSubscription"]] = []

    def __init__(self, handles, hear):
        self.hear, self.is_running = hear, True
        self.made.append(self)

    def stop(self):
        self.is_running = False


@pytest.fixture
def subscriptions(monkeypatch):
    monkeypatch.setattr("cluster.discovery.POLL_SECONDS", 0.001)
    monkeypatch.setattr("cluster.discovery.CHECK_SECONDS", 0.001)
    monkeypatch.setattr(FakeSubscription, "made", [])
    return FakeSubscription.made


def unknown_to_this_ray(handles, hear):
    raise ImportError("no long poll")


class Told:
    """What a directory told."""

    def __init__(self):
        self.events, self.more = [], asyncio.Event()

    def __call__(self, role, found):
        self.events.append((role, list(found)))
        self.more.set()

    async def until(self, *events):
        async with asyncio.timeout(60):
            while self.events[-len(events) :] != list(events):
                self.more.clear()
                await self.more.wait()


async def test_without_a_subscription_replicas_are_asked_and_failures_survived(subscriptions):
    deployment = FakeDeployment(["b:1", "a:1"], ["a:1", "b:1"], RuntimeError("a replica died"), ["a:1"])
    directory, told = ServeDirectory([(Role.DRAFT, deployment)], unknown_to_this_ray), Told()
    directory.start(told)
    await told.until((Role.DRAFT, ["a:1"]))
    directory.close()
    assert told.events == [(Role.DRAFT, ["a:1", "b:1"]), (Role.DRAFT, ["a:1"])]


async def test_the_workers_of_a_role_are_those_of_all_its_deployments(subscriptions):
    silent = FakeDeployment(RuntimeError("not now"))
    handles = [(Role.TARGET, silent), (Role.TARGET, silent), (Role.DRAFT, silent)]
    directory, told = ServeDirectory(handles, FakeSubscription), Told()
    directory.start(told)
    (pushed,) = subscriptions
    pushed.hear(0, ["a:1"])
    pushed.hear(2, ["d:1"])
    pushed.hear(1, ["c:1", "b:1"])
    pushed.hear(1, ["b:1", "c:1"])
    pushed.hear(0, [])
    directory.close()
    pushed.hear(0, ["late:1"])
    assert told.events == [
        (Role.TARGET, ["a:1"]),
        (Role.DRAFT, ["d:1"]),
        (Role.TARGET, ["a:1", "b:1", "c:1"]),
        (Role.TARGET, ["b:1", "c:1"]),
    ]


async def test_workers_that_load_announce_themselves_for_a_while(subscriptions, monkeypatch):
    """Serve lists them once they have loaded, and never those that die before."""
    directory, told = ServeDirectory([(Role.TARGET, FakeDeployment(RuntimeError("not now")))], FakeSubscription), Told()
    directory.start(told)
    directory.announced(Role.TARGET, "a:1")
    directory.announced(Role.TARGET, "b:1")
    directory.announced(Role.TARGET, "a:1")
    subscriptions[0].hear(0, ["a:1"])
    assert told.events == [(Role.TARGET, ["a:1"]), (Role.TARGET, ["a:1", "b:1"]), (Role.TARGET, ["a:1", "b:1"])]
    monkeypatch.setattr("cluster.discovery.ANNOUNCED_SECONDS", 0.0)
    directory.announced(Role.TARGET, "b:1")
    await told.until((Role.TARGET, ["a:1"]))
    directory.close()


async def test_a_subscription_that_tells_nothing_is_contradicted_by_the_replicas(subscriptions):
    crossed = FakeDeployment(["a:1"], ["a:1", "b:1"], ["a:1"], ["a:1"], ["a:1", "b:1"], ["a:1", "b:1"])
    directory, told = ServeDirectory([(Role.TARGET, crossed)], FakeSubscription), Told()
    directory.start(told)
    subscriptions[0].hear(0, ["a:1"])
    await told.until((Role.TARGET, ["a:1"]), (Role.TARGET, ["a:1", "b:1"]))
    assert len(crossed.answers) == 1  # it took two answers in a row
    directory.close()
    assert not subscriptions[0].is_running


async def test_a_subscription_that_ended_is_made_again(subscriptions):
    directory, told = ServeDirectory([(Role.TARGET, FakeDeployment(RuntimeError("not now")))], FakeSubscription), Told()
    directory.start(told)
    subscriptions[0].hear(0, ["a:1"])
    subscriptions[0].is_running = False
    async with asyncio.timeout(60):
        while len(subscriptions) < 2:
            await asyncio.sleep(0.001)
    subscriptions[1].hear(0, ["b:1"])
    directory.close()
    assert told.events == [(Role.TARGET, ["a:1"]), (Role.TARGET, ["b:1"])]


async def test_streams_go_on_while_a_subscription_is_made_again(subscriptions):
    """It takes a minute where Ray's head is away."""
    waiting, back = threading.Event(), threading.Event()

    def subscribe(handles, hear):
        if subscriptions:
            waiting.set()
            assert back.wait(60), "the loop that should set it stands still"
        return FakeSubscription(handles, hear)

    directory, told = ServeDirectory([(Role.TARGET, FakeDeployment(RuntimeError("not now")))], subscribe), Told()
    directory.start(told)
    subscriptions[0].is_running = False
    async with asyncio.timeout(60):
        while not waiting.is_set():
            await asyncio.sleep(0.001)
    directory.close()
    back.set()
    async with asyncio.timeout(60):
        while len(subscriptions) < 2 or subscriptions[1].is_running:
            await asyncio.sleep(0.001)


def http_at(monkeypatch, host, hosts=("127.0.0.1",), answers_anyone=False):
    """Serve's HTTP there, in a Ray cluster of these hosts."""
    client = SimpleNamespace(http_config=HTTPOptions(host=host, port=8000))
    monkeypatch.setattr(context, "_get_global_client", lambda: client)
    nodes = [{"NodeManagerAddress": host, "Alive": True} for host in hosts]
    monkeypatch.setattr("ray.nodes", lambda: [*nodes, {"NodeManagerAddress": "192.0.2.9", "Alive": False}])
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address="192.0.2.1:6379"))
    monkeypatch.setattr(connection, "answers_anyone", {"192.0.2.1:6379": answers_anyone}.__getitem__)


@pytest.mark.parametrize(
    ("host", "args", "open_to_all"),
    [
        ("0.0.0.0", {}, True),
        ("0.0.0.0", {"router": {"allow_remote": True}}, False),
        ("0.0.0.0", {"security": {"api_keys": "/keys"}}, False),
        ("0.0.0.0", {"ray": {"address": "local"}}, True),
        ("127.0.0.1", {"ray": {"address": "local"}}, False),
        ("127.0.0.1", {}, False),
        (None, {}, False),
    ],
)
def test_a_router_looks_where_serve_listens(monkeypatch, host, args, open_to_all):
    """A RayService says so beside our configuration, in which HTTP is on loopback."""
    http_at(monkeypatch, host)
    config = from_mapping({"ray": {"address": "auto"}} | args, "args")
    if open_to_all:
        with pytest.raises(SecurityError, match=r"^0\.0\.0\.0 can be reached .*--api-keys"):
            replicas._check_doors(config)
    else:
        replicas._check_doors(config)


@pytest.mark.parametrize(
    ("hosts", "answers_anyone", "args", "refused"),
    [
        (["192.0.2.1", "192.0.2.2"], True, {}, True),
        (["192.0.2.1", "192.0.2.2"], True, {"security": {"api_keys": "/keys"}}, True),
        (["192.0.2.1", "192.0.2.2"], False, {}, False),
        (["192.0.2.1"], True, {"router": {"allow_remote": True}}, False),
        (["127.0.0.1"], True, {}, False),
    ],
)
def test_a_router_serves_in_no_ray_cluster_that_is_open_to_all(monkeypatch, hosts, answers_anyone, args, refused):
    """As `paceline up` does not: whoever could run code on it would pass every other guard."""
    http_at(monkeypatch, "127.0.0.1", hosts, answers_anyone)
    config = from_mapping(args, "args")
    if refused:
        with pytest.raises(CommandError, match=r"asks for no token: .* RAY_AUTH_MODE=token"):
            replicas._check_doors(config)
    else:
        replicas._check_doors(config)


async def test_a_router_that_anyone_could_use_does_not_start(monkeypatch):
    http_at(monkeypatch, "0.0.0.0")
    kind = replicas.RouterReplica
    monkeypatch.setattr(kind, "__del__", lambda self: None)
    with pytest.raises(SecurityError):
        await kind.__init__(kind.__new__(kind), from_mapping({"ray": {"address": "auto"}}, "args"), [])


def test_a_worker_on_a_node_of_ipv6_has_an_address(monkeypatch):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "2001:db8::7")
    config = from_mapping({"ray": {"address": "auto"}, "router": {"allow_remote": True}}, "args")
    assert replicas._listen(config) == "[2001:db8::7]:0"


@pytest.mark.parametrize("allowed", [True, False])
def test_a_worker_of_paceline_up_is_told_whether_it_may_listen_beyond_loopback(monkeypatch, allowed):
    """By the settings in its environment, which are not all."""
    config = from_mapping({"ray": {"address": "auto"}, "router": {"allow_remote": allowed}}, "args")
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "192.0.2.5")
    for pool in config.pools():
        environment = options(config, pool, settings=True)["ray_actor_options"]["runtime_env"]["env_vars"]
        monkeypatch.setenv(SETTINGS, environment[SETTINGS])
        if allowed:
            assert replicas._listen(known(outline(config))) == "192.0.2.5:0"
        else:
            with pytest.raises(SecurityError, match=r"^192\.0\.2\.5 can be reached"):
                replicas._listen(known(outline(config)))
