"""Makes the templates of the Helm chart from the kustomize overlays, so that every manifest is written once.

    python -m deploy.chart

Before, it wraps monitoring/alerts.yaml, which plain Prometheus reads, for the Prometheus operator; kustomize cannot.
Every overlay is rendered with a mark in the place of each value, once as it is and once more with each component that a
release may leave out or add, or two where one changes the other. Of every object the renderings are merged line by
line: a line that only some of them have gets a condition, a mark becomes the value's name. So the chart takes the same
values.yaml as the overlay; whether Helm makes the same objects of it as kustomize does is for a test to see.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from deploy.manifests import Manifests, render

DEPLOY = Path(__file__).resolve().parent
CHART = DEPLOY / "helm" / "paceline"
OVERLAYS = ("dev-cpu", "gpu", "ha")
COMPONENTS = {
    name: f"../../components/{name}"
    for name in ("certificates", "gateway", "inference-pool", "ingress", "models", "nvidia-runtime", "registry")
} | {"monitoring": "../../../monitoring"}
"""Parts that a release has or not: where an overlay names them."""
WITH_COMPONENTS = ("gpu", "ha")
ALERTS, RULE = (DEPLOY / "monitoring" / name for name in ("alerts.yaml", "prometheusrule.yaml"))
DASHBOARD = "dashboard.json"
"""Linked into the chart: Helm reads it from there."""
NAMESPACE = "mark-of-the-namespace"
FIRST_NUMBER = 7_700_000
HEADER = "{{- /* Made by `python -m deploy.chart` from ../../kubernetes; a test checks that it is current. */ -}}\n"

Variant = tuple[str, tuple[str, ...]]
"""An overlay, and the components that it is rendered with, in order."""
PAIRS = (("inference-pool", "registry"),)
"""Where the later one changes what the earlier one brings."""
CHOICES: tuple[tuple[str, ...], ...] = (*((component,) for component in COMPONENTS), *PAIRS)
VARIANTS: tuple[Variant, ...] = (
    *((overlay, ()) for overlay in OVERLAYS),
    *((WITH_COMPONENTS[0], components) for components in CHOICES),
)
"""All that are rendered: what a component adds to one overlay it adds to the others that may have it."""


class ChartError(Exception):
    """An overlay says something that no template here can say. One line."""


@dataclass(frozen=True, slots=True)
class Line:
    """Of an object, and the renderings that have it."""

    text: str
    variants: frozenset[Variant]


def files(deploy: Path = DEPLOY) -> dict[str, str]:
    """What is made, by its path in the chart. Raises :class:`ChartError`, :class:`deploy.manifests.RenderError`."""
    values = {overlay: overlay_values(deploy, overlay) for overlay in OVERLAYS}
    marks = Marks({key: value for one in values.values() for key, value in one.items()})
    marks.actions[(deploy / "monitoring" / DASHBOARD).read_text(encoding="utf-8")] = f'.Files.Get "{DASHBOARD}"'
    objects: dict[tuple[str, str], dict[Variant, list[str]]] = {}
    for variant in VARIANTS:
        for entry in _rendered(deploy, variant, marks).objects:
            if entry["kind"] != "Namespace":  # Helm needs it before it can install anything
                lines = ["---", *_dumped(entry, marks).splitlines()]
                objects.setdefault((entry["kind"], entry["metadata"]["name"]), {})[variant] = lines
    made: dict[str, str] = {}
    for (kind, _), renderings in objects.items():
        path = f"templates/{kind.lower()}.yaml"
        made[path] = made.get(path, HEADER) + template(renderings)
    made["values.schema.json"] = json.dumps(_schema(values), indent=2) + "\n"
    return made


def prometheus_rule() -> str:
    """What stands in :data:`RULE`."""
    spec = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    head = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": {"name": "paceline"}}
    text = yaml.safe_dump(head | {"spec": spec}, sort_keys=False, width=120)
    return f"# Made by `python -m deploy.chart` from alerts.yaml.\n{text}"


def template(renderings: Mapping[Variant, list[str]]) -> str:
    """Of one object, with a condition around the lines that not all releases have. Raises :class:`ChartError`."""
    merged: list[Line] = []
    for variant, texts in renderings.items():
        merged = _merge(merged, texts, variant)
    said = ""
    for condition, lines in groupby(merged, _condition):
        text = "".join(f"{line.text}\n" for line in lines)
        said += f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n" if condition else text
    return said


def overlay_values(deploy: Path, overlay: str) -> dict[str, str]:
    """The values that an overlay's values.yaml sets."""
    text = (deploy / "kubernetes" / "overlays" / overlay / "values.yaml").read_text(encoding="utf-8")
    found: dict[str, str] = yaml.safe_load(text)["data"]
    return found


class Marks:
    """What stands for each value while kustomize carries it where it belongs; a number for one that is a number."""

    def __init__(self, values: Mapping[str, str]) -> None:
        numbers = enumerate(values, start=FIRST_NUMBER)
        self.by_key = {
            key: str(number) if value.isdecimal() else f"mark-of-{key}-"
            for (number, key), value in zip(numbers, values.values(), strict=True)
        }
        self.actions = {mark: f'index .Values.data "{key}"' for key, mark in self.by_key.items()}
        """What each means in a template."""
        self.actions[NAMESPACE] = ".Release.Namespace"
        self.pattern = re.compile(f"({'|'.join(map(re.escape, self.actions))})")


def _rendered(deploy: Path, variant: Variant, marks: Marks) -> Manifests:
    """An overlay with its values marked, and of :data:`COMPONENTS` with none but the variant's."""
    overlay, components = variant
    with tempfile.TemporaryDirectory() as folder:
        for part in ("kubernetes", "monitoring"):
            shutil.copytree(deploy / part, Path(folder) / part)
        place = Path(folder) / "kubernetes" / "overlays" / overlay
        values = yaml.safe_load((place / "values.yaml").read_text(encoding="utf-8"))
        values["data"] = {key: marks.by_key[key] for key in values["data"]}
        (place / "values.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        said = yaml.safe_load((place / "kustomization.yaml").read_text(encoding="utf-8"))
        kept = [path for path in said["components"] if path not in COMPONENTS.values()]
        said["components"] = [*(COMPONENTS[component] for component in components), *kept]
        said["namespace"] = NAMESPACE
        (place / "kustomization.yaml").write_text(yaml.safe_dump(said), encoding="utf-8")
        return render(place)


def _dumped(entry: Any, marks: Marks) -> str:
    """An object as YAML in a template: actions in the place of marks, braces of its own escaped.

    Without aliases, which a condition could cut off from their anchor; text of several lines as such.
    """
    actions: list[str] = []

    class Dumper(yaml.CSafeDumper):
        def ignore_aliases(self, _data: Any) -> bool:
            return True

    def scalar(dumper: Dumper, value: str | int) -> yaml.ScalarNode:
        if (action := _action(value, marks)) is not None:  # a plain word stands for it
            actions.append(action)
            value = f"ACTION{len(actions) - 1}END"
        if isinstance(value, int):
            return dumper.represent_int(value)
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, scalar)
    Dumper.add_representer(int, scalar)
    text = yaml.dump(entry, Dumper=Dumper, width=10_000, sort_keys=False, allow_unicode=True)
    text = text.replace("{{", '{{ "{{" }}')
    return re.sub(r"ACTION(\d+)END", lambda found: f"{{{{ {actions[int(found[1])]} }}}}", text)


def _action(scalar: str | int, marks: Marks) -> str | None:
    """What a template says in the place of a scalar; None: nothing is marked in it."""
    if isinstance(scalar, int):
        return marks.actions.get(str(scalar))
    if scalar in marks.actions:
        return f"{marks.actions[scalar]} | quote"
    pieces = [piece for piece in marks.pattern.split(scalar) if piece]
    if not any(piece in marks.actions for piece in pieces):
        return None
    said = (f"({marks.actions[piece]})" if piece in marks.actions else json.dumps(piece) for piece in pieces)
    return f"print {' '.join(said)} | quote"


def _merge(lines: list[Line], texts: list[str], variant: Variant) -> list[Line]:
    """``lines`` and one more rendering of the same object."""
    made: list[Line] = []
    known = [line.text for line in lines]
    for what, first, last, begin, end in SequenceMatcher(None, known, texts, autojunk=False).get_opcodes():
        if what == "equal":
            made += [Line(line.text, line.variants | {variant}) for line in lines[first:last]]
        else:
            made += lines[first:last] + [Line(text, frozenset({variant})) for text in texts[begin:end]]
    return made


def _condition(line: Line) -> str:
    """Of a release, for it to have a line; empty: every one has."""
    always = [overlay for overlay in OVERLAYS if (overlay, ()) in line.variants]
    having = [components for components in CHOICES if (WITH_COMPONENTS[0], components) in line.variants]
    if not always:
        return _brought(line, having)
    if len(having) != (len(CHOICES) if WITH_COMPONENTS[0] in always else 0):
        raise ChartError(f"a component takes out or changes what others leave as it is: {line.text.strip()!r}")
    return f"has .Values.overlay (list {_list(always)})" if len(always) < len(OVERLAYS) else ""


def _brought(line: Line, having: list[tuple[str, ...]]) -> str:
    """Of a release, for it to have a line that only components bring."""
    if any({*some} < {*more} for some in having for more in CHOICES if more not in having):
        raise ChartError(f"a component takes out or changes what another brings: {line.text.strip()!r}")
    fewest = [some for some in having if not any({*fewer} < {*some} for fewer in having)]
    any_of = " ".join(map(_chosen, fewest))
    return f"and (has .Values.overlay (list {_list(WITH_COMPONENTS)})) (or {any_of})"


def _chosen(components: Iterable[str]) -> str:
    """Whether a release has all of them."""
    has = [f"(has {json.dumps(component)} .Values.components)" for component in components]
    return has[0] if len(has) == 1 else f"(and {' '.join(has)})"


def _list(names: Iterable[str]) -> str:
    return " ".join(map(json.dumps, names))


def _form(key: str, usual: str) -> dict[str, str]:
    """Of a value: a number where it is one in the overlay; of cores also a part of one, as Kubernetes writes it."""
    if not usual.isdecimal():
        return {}
    return {"pattern": "^[0-9]+(m|[.][0-9]+)?$" if key.endswith("-cpu") else "^[0-9]+$"}


def _schema(values: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """What Helm refuses values for: what kustomize would not find either, and what it would not use."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "required": ["overlay", "components", "data"],
        "properties": {
            "overlay": {"enum": list(OVERLAYS)},
            "components": {"type": "array", "items": {"enum": sorted(COMPONENTS)}},
        },
        "allOf": [
            {
                "if": {"properties": {"overlay": {"const": overlay}}},
                "then": {
                    "properties": {
                        "data": {
                            "type": "object",
                            "required": sorted(known),
                            "additionalProperties": False,
                            "properties": {key: {"type": "string"} | _form(key, known[key]) for key in sorted(known)},
                        }
                    }
                },
            }
            for overlay, known in values.items()
        ],
    }


def main() -> None:
    """The command: writes the files, and takes away those that are not made any more."""
    RULE.write_text(prometheus_rule(), encoding="utf-8")
    made = files()
    for path in (CHART / "templates").glob("*.yaml"):
        path.unlink()
    for name, text in made.items():
        (CHART / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
