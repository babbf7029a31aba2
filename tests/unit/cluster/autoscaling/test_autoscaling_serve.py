"""The policies as Ray Serve calls them, with contexts like Serve's, and what is declared to it. No Ray is started."""

from types import SimpleNamespace

import pytest
from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.schema import ServeDeploySchema

from cluster.autoscaling.hysteresis import HoldReason
from cluster.autoscaling.policy import Why
from cluster.autoscaling.serve_policy import STATE, DecisionMetrics, ServePolicy, declared, figures
from cluster.config.checks import CheckError, check_bounds
from cluster.config.config import from_mapping
from cluster.placement import needs
from cluster.ray.parts import declaration
from speculation.demand import DraftDemand, RouterDemand, TargetDemand

CONFIG = {
    "models": {
        "a": {"target": {"max_replicas": 3}, "drafts": {"small": {"max_replicas": 2}}},
        "b": {"target": {"replicas": 2}},
    },
    "autoscaling": {"up_s": 0, "down_s": 10, "pause_s": 0},
}
TARGET, DRAFT, ROUTER = "TargetWorker-a", "DraftWorker-a.small", "Router"


class Controller:
    """Calls the policy as Serve's controller does, and keeps what it keeps."""

    def __init__(self):
        application = declaration(from_mapping(CONFIG, "test"))
        self.now = self.set_back = 0.0
        self.policy = self.policy_of(application["autoscaling_policy"]["policy_kwargs"])
        self.bounds = {entry["name"]: entry["autoscaling_config"] for entry in application["deployments"]}
        self.replicas = {name: bounds["min_replicas"] for name, bounds in self.bounds.items()}
        self.running = dict(self.replicas)
        self.states = {name: {} for name in self.bounds}

    def policy_of(self, told):
        return ServePolicy(**told, clock=lambda: self.now)

    def call(self, now, **heard):
        """``heard``: by role, a list of what every replica said at the start and the end of the last ten seconds."""
        self.now, contexts = now, {}
        for name in self.bounds:
            said = heard.get(name.partition("Worker")[0].lower(), []) if not name.startswith("TargetWorker-b") else []
            series = {}
            for replica, (first, last) in enumerate(said):
                for figure in first:
                    points = [SimpleNamespace(timestamp=now - 10, value=first[figure])]
                    points.append(SimpleNamespace(timestamp=now, value=last[figure]))
                    series.setdefault(figure, {})[replica] = points
            averages = {
                key: {replica: (points[0].value + points[-1].value) / 2 for replica, points in one.items()}
                for key, one in series.items()
            }
            contexts[name] = SimpleNamespace(
                deployment_name=name,
                target_num_replicas=self.replicas[name],
                current_num_replicas=self.running[name],
                capacity_adjusted_min_replicas=self.bounds[name]["min_replicas"],
                capacity_adjusted_max_replicas=self.bounds[name]["max_replicas"],
                current_time=now - self.set_back,
                raw_metrics=series,
                aggregated_metrics=averages,
                policy_state=self.states[name],
            )
        self.replicas, self.states = self.policy(contexts)
        return self.replicas


class Decisions:
    """What was last wanted of every pool, and the log of changes."""

    def __init__(self, log):
        self.wanted, self.log = {}, log

    def __getitem__(self, name):
        return self.wanted[name]

    def changes(self, name):
        return [line.removeprefix(f"{name}: ") for line in self.log.messages if line.startswith(f"{name}: ")]


@pytest.fixture
def decided(monkeypatch, caplog):
    decisions = Decisions(caplog)
    steer = ServePolicy._steer

    def steered(policy, now, ctx, wanted):
        decisions.wanted[ctx.deployment_name] = wanted
        return steer(policy, now, ctx, wanted)

    monkeypatch.setattr(ServePolicy, "_steer", steered)
    monkeypatch.setattr(DecisionMetrics, "tell", lambda _, told: None)
    return decisions


def target(computed=0.0, **gauges):
    demand = {"capacity_tokens": 1000, "places": 10, "speed": 100, "sessions": 1} | gauges
    return figures(TargetDemand(**demand)), figures(TargetDemand(**demand, computed=10 * computed))


def draft(asked, delivered, busy):
    return figures(DraftDemand()), figures(DraftDemand(10 * asked, 10 * delivered, 10 * busy))


def router(**demand):
    both = figures(RouterDemand(**demand), "a") | figures(RouterDemand(), "b")
    return both, both


def test_every_pool_follows_its_own_figures(decided):
    controller = Controller()
    assert controller.replicas == {TARGET: 1, DRAFT: 0, "TargetWorker-b": 2, "DraftWorker-b.draft": 1, ROUTER: 1}
    sizes = controller.call(100.0, target=[target(computed=120)], router=[router(streams=1, undrafted=1)])
    assert sizes == {TARGET: 2, DRAFT: 1, "TargetWorker-b": 2, "DraftWorker-b.draft": 1, ROUTER: 1}
    assert (decided[TARGET].why, decided[DRAFT].why, decided[ROUTER].why) == ("work", "demand", "streams")
    assert decided.changes(DRAFT) == ["0 -> 1 replicas; demand: 1 sessions want drafts and have no drafter"]
    controller.running |= {TARGET: 2, DRAFT: 1}
    sizes = controller.call(
        101.0, target=[target(computed=60)] * 2, draft=[draft(100, 20, 1.0)], router=[router(streams=1)]
    )
    assert (sizes[TARGET], sizes[DRAFT]) == (2, 2)
    (change,) = decided.changes(TARGET)
    assert change.startswith("1 -> 2 replicas; work: ")


def test_a_pool_that_has_grown_grows_again_though_the_clock_on_the_wall_is_set_back(decided):
    controller = Controller()
    assert controller.call(100.0, target=[target(computed=120)])[TARGET] == 2
    controller.running[TARGET], controller.set_back = 2, 3600.0
    assert controller.call(101.0, target=[target(computed=120)] * 2)[TARGET] == 3


def test_a_router_is_counted_once_however_many_models_it_serves(decided):
    controller = Controller()
    both = figures(RouterDemand(streams=150), "a") | figures(RouterDemand(streams=50), "b")
    controller.call(0.0, router=[(both, both)] * 2)
    assert decided[ROUTER].says == "400 streams on 2 routers; 256 are enough for one"


def test_drafters_go_when_nobody_asks_and_come_back(decided):
    controller = Controller()
    controller.replicas[DRAFT] = controller.running[DRAFT] = 1
    for now in (0.0, 9.0):
        assert controller.call(now, draft=[draft(0, 0, 0)], router=[router()])[DRAFT] == 1
    assert controller.call(10.0, draft=[draft(0, 0, 0)], router=[router()])[DRAFT] == 0
    controller.running[DRAFT] = 0
    assert controller.call(11.0, router=[router()])[DRAFT] == 0
    assert controller.call(12.0, router=[router(streams=1, undrafted=1)])[DRAFT] == 1


def test_drafters_grow_while_sessions_find_no_place_and_no_longer(decided):
    controller = Controller()
    controller.replicas[DRAFT] = controller.running[DRAFT] = 1
    started, _ = router(streams=8, undrafted=8)
    served, _ = router(streams=8)
    lacking, _ = router(streams=8, undrafted=4)
    for now, heard, replicas in ((0.0, (started, served), 1), (1.0, (lacking, lacking), 2)):
        assert controller.call(now, draft=[draft(100, 100, 0.5)], router=[heard])[DRAFT] == replicas
    assert decided.changes(DRAFT) == ["1 -> 2 replicas; demand: 4 sessions want drafts and have no drafter"]


def test_a_pool_that_has_not_reported_stays_as_it_is(decided):
    controller = Controller()
    controller.replicas |= {DRAFT: 2, TARGET: 2}
    controller.running[DRAFT] = 2
    for now in (0.0, 1000.0):
        sizes = controller.call(now, draft=[draft(0, 0, 0)], router=[router()])
        assert (sizes[DRAFT], sizes[TARGET]) == (2, 2), "one drafter and both targets have yet to report"
    assert decided[TARGET].why == "unknown"


def test_a_pool_that_the_policy_was_not_told_of_stays_as_it_is_and_the_others_scale(decided, caplog):
    controller = Controller()
    told = declared(from_mapping(CONFIG, "test"))["policy_kwargs"]
    told["pools"] = [pool for pool in told["pools"] if pool["deployment"] != TARGET]
    controller.policy = controller.policy_of(told)
    for now in (0.0, 1000.0):
        sizes = controller.call(now, target=[target(computed=120)], router=[router(streams=1, undrafted=1)])
        assert sizes == {TARGET: 1, DRAFT: 1, "TargetWorker-b": 2, "DraftWorker-b.draft": 1, ROUTER: 1}
    assert decided[TARGET].says == "policy_kwargs.pools does not list it"
    (line,) = [message for message in caplog.messages if "policy_kwargs" in message]
    assert line.startswith(f"{TARGET} is not in policy_kwargs.pools, so it stays as it is; there are ['DraftWorker-a")


def test_the_policy_never_raises_and_keeps_sizes_and_state(monkeypatch, decided):
    controller = Controller()
    before = controller.call(0.0, target=[target(computed=10)])
    remembered = controller.states[TARGET]
    monkeypatch.setattr("cluster.autoscaling.serve_policy.steer", lambda *_: 1 / 0)
    assert controller.call(1.0, target=[target(computed=500)]) == before
    assert controller.states[TARGET] == remembered
    assert remembered[STATE]


def test_decisions_are_told_by_rays_metrics(monkeypatch):
    series = {}

    class Gauge:
        def __init__(self, name, _about, tags):
            self.name, self.tags = name, tags

        def set(self, value, tags):
            series[self.name, *(tags[tag] for tag in self.tags)] = value

    monkeypatch.setattr("ray.util.metrics.Gauge", Gauge)
    controller = Controller()
    controller.call(0.0, target=[target(computed=120)])
    replicas, info = "paceline_autoscaling_replicas", "paceline_autoscaling_decision_info"
    assert (series[replicas, TARGET, "decided"], series[replicas, TARGET, "running"]) == (2, 1)
    assert series[info, TARGET, "work", ""] == 1
    controller.call(1.0, target=[target(sessions=0)])
    reasons = {key[2:]: value for key, value in series.items() if key[:2] == (info, TARGET)}
    assert reasons.pop(("work", "")) == 0, "that was before"
    assert list(reasons.values()) == [1]


def test_metrics_that_cannot_be_told_do_not_matter(monkeypatch, caplog):
    monkeypatch.setattr("ray.util.metrics.Gauge", lambda *_: 1 / 0)
    assert Controller().call(0.0, target=[target(computed=120)])[TARGET] == 2
    assert "cannot tell autoscaling decisions: division by zero" in caplog.messages


def test_what_is_declared_is_what_serve_takes():
    described = declaration(from_mapping(CONFIG, "test"))
    ServeDeploySchema.model_validate({"applications": [described]})
    bounds = {
        entry["name"]: (entry["autoscaling_config"]["min_replicas"], entry["autoscaling_config"]["max_replicas"])
        for entry in described["deployments"]
    }
    expected = {TARGET: (1, 3), DRAFT: (0, 2), "TargetWorker-b": (2, 2), "DraftWorker-b.draft": (1, 1), ROUTER: (1, 1)}
    assert bounds == expected
    for entry in described["deployments"]:
        taken = ServeAutoscaling(**entry["autoscaling_config"])
        assert (taken.upscale_delay_s, taken.downscale_delay_s) == (0, 0)
    assert described["autoscaling_policy"] == declared(from_mapping(CONFIG, "test"))


def test_bounds_and_settings_may_change_without_replacing_replicas():
    """``args`` and the options of actors decide whether Serve replaces them."""
    changed = {**CONFIG, "autoscaling": {"load": 0.5}}
    changed["models"] = {**CONFIG["models"], "a": {"target": {"max_replicas": 5}, "drafts": {"small": {"replicas": 1}}}}
    before, after = (declaration(from_mapping(one, "test")) for one in (CONFIG, changed))
    assert before["args"] == after["args"]
    assert before["deployments"] != after["deployments"]
    started = [[entry["ray_actor_options"] for entry in described["deployments"]] for described in (before, after)]
    assert started[0] == started[1]
    again = from_mapping(before["args"], "args")
    assert {need.deployment for need in needs(again)} == {entry["name"] for entry in before["deployments"]}


def test_fixed_pools_are_declared_as_before():
    described = declaration(from_mapping({}, "test"))
    assert "autoscaling_policy" not in described
    assert (described["deployments"][0]["name"], described["deployments"][0]["num_replicas"]) == ("TargetWorker", 1)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"target": {"max_replicas": 4}, "backend": "local"}, "target.max_replicas is 4, but without Ray numbers of"),
        ({"draft": {"min_replicas": 3, "max_replicas": 2}}, "draft.min_replicas is 3, which is more than its max_repl"),
        ({"models": {"a": {"target": {"min_replicas": 3, "max_replicas": 2}}}}, "models.a.target.min_replicas is 3"),
        ({"target": {"max_replicas": 2, "standby": 1}}, "target.standby is 1, which needs a fixed number of replicas"),
        ({"router": {"max_replicas": 2}, "backend": "local"}, "router.max_replicas is 2, but without Ray"),
    ],
)
def test_bounds_that_cannot_be_are_refused(document, words):
    with pytest.raises(CheckError) as caught:
        check_bounds(from_mapping(document, "test"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_decision_is_told_again_before_ray_forgets_it(monkeypatch):
    told, now = [], [100.0]
    metrics = DecisionMetrics(lambda: now[0])
    monkeypatch.setattr(metrics, "_set", lambda fresh: told.append(dict(fresh)))
    decision = {TARGET: (1, 1, Why.WORK, HoldReason.NOTHING)}
    for second in (0.0, 0.1, 1.9, 2.1, 2.2, 4.2):
        now[0] = 100.0 + second
        metrics.tell(decision)
    assert told == [decision] * 3
    metrics.tell({TARGET: (2, 1, Why.WORK, HoldReason.NOTHING)})
    assert len(told) == 4
