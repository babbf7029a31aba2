"""The Helm chart, rendered by Helm itself: the same objects as kustomize makes of the same values."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from deploy.chart import CHART, CHOICES, COMPONENTS, PAIRS, ChartError, files, overlay_values, template
from deploy.manifests import Manifests, Object, render
from deploy.validate import findings
from tests.deploy.overlays import KUBERNETES, OVERLAYS, needs_kubectl, rendered

NAMESPACE = "paceline"


def by_name(objects: Sequence[Object]) -> dict[tuple[str, str], Object]:
    """All but the Namespace, which is there before Helm."""
    return {(entry["kind"], entry["metadata"]["name"]): entry for entry in objects if entry["kind"] != "Namespace"}


def by_helm(values: Mapping[str, Any]) -> list[Object]:
    """What ``helm template`` makes of the chart."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(dict(values))
        texts = chart.render(dict(values), name="paceline", namespace=NAMESPACE)
    return [entry for text in texts.values() for entry in yaml.safe_load_all(text) if entry]


def values_of(overlay: str, **others: Any) -> dict[str, Any]:
    """As ``--values`` with the overlay's file and ``--set overlay=``."""
    text = (KUBERNETES / "overlays" / overlay / "values.yaml").read_text()
    return {**helm_python.values_from_yaml(text), "overlay": overlay, **others}


@needs_kubectl
def test_chart_is_current() -> None:
    made = {CHART / name: text for name, text in files().items()}
    there = {path: path.read_text() for path in (*CHART.glob("templates/*"), CHART / "values.schema.json")}
    assert there == made, "run python -m deploy.chart"


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_helm_makes_what_kustomize_makes(overlay: str) -> None:
    made = by_helm(values_of(overlay))
    assert by_name(made) == by_name(rendered(overlay).objects)
    assert findings(Manifests(made)) == []


@needs_kubectl
def test_components_that_an_overlay_does_not_name_are_the_same_too(tmp_path: Path) -> None:
    """And those that it names can be left out. The chart is made with `gpu`'s components alone, so this is `ha`."""
    others = sorted(COMPONENTS.keys() - {"certificates", "gateway", "models"})  # `registry` after what it patches
    shutil.copytree(KUBERNETES.parent, tmp_path / "deploy")
    overlay = tmp_path / "deploy/kubernetes/overlays/ha"
    said = yaml.safe_load((overlay / "kustomization.yaml").read_text())
    said["components"] = [path for path in said["components"] if path not in COMPONENTS.values()]
    said["components"] = [*(COMPONENTS[name] for name in others), *said["components"]]
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(said))
    assert by_name(by_helm(values_of("ha", components=others))) == by_name(render(overlay).objects)


@needs_kubectl
def test_other_values_go_where_kustomize_carries_them(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES.parent, tmp_path / "deploy")
    file = tmp_path / "deploy/kubernetes/overlays/ha/values.yaml"
    said = yaml.safe_load(file.read_text())
    for place, (key, value) in enumerate(said["data"].items(), start=2):
        said["data"][key] = str(place) if value.isdecimal() else f'{value} "{{{{ {place} }}}}" ä: |\n#'
    file.write_text(yaml.safe_dump(said))
    assert by_name(by_helm({**said, "overlay": "ha"})) == by_name(render(file.parent).objects)


def test_release_has_the_namespace_that_helm_is_told() -> None:
    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(values_of("gpu"), name="one", namespace="elsewhere")
    objects = [entry for text in texts.values() for entry in yaml.safe_load_all(text) if entry]
    assert {entry["metadata"]["namespace"] for entry in objects} == {"elsewhere"}


def test_helm_has_no_objections() -> None:
    said = helm_python.lint(CHART, values=values_of("ha"))
    assert said["errors"] == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"overlay": ""}, "overlay"),
        ({"components": ["gatway"]}, "components"),
        ({"data": overlay_values(KUBERNETES.parent, "ha")}, "redis-image"),
        ({"data": overlay_values(KUBERNETES.parent, "dev-cpu")}, "small-gpus"),
        ({"data": overlay_values(KUBERNETES.parent, "gpu") | {"small-gpus": 1}}, "small-gpus"),
        ({"data": overlay_values(KUBERNETES.parent, "gpu") | {"large-workers": "two"}}, "large-workers"),
        ({"data": overlay_values(KUBERNETES.parent, "gpu") | {"small-cpu": "3.5m"}}, "small-cpu"),
    ],
)
def test_values_that_do_not_fit_are_refused(changes: dict[str, Any], named: str) -> None:
    with helm_python.Chart.load(CHART) as chart, pytest.raises(helm_python.HelmError, match=named):
        chart.validate_schema(values_of("gpu") | changes)


@pytest.mark.parametrize("cores", ["3", "3.5", "3500m"])
def test_cores_are_told_as_kubernetes_does(cores: str) -> None:
    data = overlay_values(KUBERNETES.parent, "gpu") | {"small-cpu": cores}
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values_of("gpu") | {"data": data})


def test_line_that_a_component_changes_cannot_be_said() -> None:
    same = {("gpu", components): ["a: 1"] for components in CHOICES}
    bases = {(overlay, ()): ["a: 1"] for overlay in OVERLAYS}
    assert template(bases | same) == "a: 1\n"
    with pytest.raises(ChartError, match="'a: 1'"):
        template(bases | same | {("gpu", ("ingress",)): ["a: 2"]})
    first, pair = PAIRS[0][:1], PAIRS[0]
    added = bases | same | {("gpu", first): ["a: 1", "b: 1"]}
    assert template(added | {("gpu", pair): ["a: 1", "b: 1", "c: 1"]})
    with pytest.raises(ChartError, match="'b: 1'"):
        template(added | {("gpu", pair): ["a: 1", "b: 2"]})
