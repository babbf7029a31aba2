"""Whether the models that a Job fetches fit on their volume, come in parts, and are waited for by who reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cluster.fetch import COMPLETE, READABLE, FetchError, models_in, quantity
from deploy.manifests import Manifests, Object, Pod, RayService, Violation, environment_of

LIST, STORAGE = "MODELS", "STORAGE"
"""Variables of the Job: FOLDER=HUB-ID, separated by spaces; and how large the volume was asked to be."""
FETCHING = "cluster.fetch"
CLAIM = "paceline-models"
SMALL = {"fp8": 1.0, "int8": 1.0, "w8a8": 1.0, "8bit": 1.0, "awq": 0.55, "gptq": 0.55, "int4": 0.55, "4bit": 0.55}
"""Bytes of a weight of models whose names say so; two of all others."""


def model_findings(manifests: Manifests) -> Iterator[Violation]:
    """Of every Job that fetches models, and of the pods that read these."""
    for pod in fetching(manifests):
        yield from ((pod.where, what) for what in _of_job(pod.main, manifests))
        yield from _of_waiting(manifests.ray)


def fetching(manifests: Manifests) -> list[Pod]:
    """The pods that fetch models."""
    return [pod for pod in manifests.pods() if pod.where.startswith("Job") and LIST in environment_of(pod.main)]


def _of_job(container: Object, manifests: Manifests) -> Iterator[str]:
    told = environment_of(container)
    if FETCHING not in container.get("command", []):
        yield f"must run {FETCHING}, which checks that models fit, leaves copies out, and brings tokenizers first"
    sizes = {
        str(claim["metadata"]["name"]): str(claim["spec"]["resources"]["requests"]["storage"])
        for claim in manifests.of("PersistentVolumeClaim")
    }
    if CLAIM in sizes and told.get(STORAGE) != sizes[CLAIM]:
        yield f"{STORAGE} is {told.get(STORAGE)!r}, but the volume has {sizes[CLAIM]}"
    try:
        models, capacity = models_in(told[LIST]), quantity(told.get(STORAGE, ""))
    except FetchError as error:
        yield str(error)
        return
    for folder, model in models.items():
        if not model.pinned:
            yield f"{folder}={model} names no commit, so it may be another model tomorrow: {folder}={model.name}@COMMIT"
    least = sum(least_bytes(model.name) for model in models.values())
    if least > capacity:
        yield f"by their names the models take {least / (1 << 30):.0f} GiB, storage-size is {told[STORAGE]}"


def least_bytes(model: str) -> int:
    """Of a model's weights, as far as its name tells how many there are: ``Llama-3.3-70B`` has 70 billion."""
    counts = re.findall(r"(?<![\w.])(?:(\d+)x)?(\d+(?:\.\d+)?)B(?![a-z])", model)
    size = next((small for word, small in SMALL.items() if word in model.lower()), 2.0)
    return int(max((float(count) for _, count in counts), default=0.0) * size * 1e9)


def _of_waiting(ray: RayService) -> Iterator[Violation]:
    """Routers read tokenizers, workers weights; each waits for no more and no less."""
    for group in ray.workers:
        claims = {one.get("persistentVolumeClaim", {}).get("claimName") for one in group.spec.get("volumes", [])}
        if CLAIM not in claims:
            continue
        mark = COMPLETE if group.gpus else READABLE
        waits = " ".join(" ".join(entry.get("args", [])) for entry in group.spec.get("initContainers", []))
        if f"/{mark}" not in waits:
            yield group.where, f"must wait until each model has {mark}, in an init container"
