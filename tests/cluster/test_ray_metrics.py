"""A router's metrics through a real Ray: the same names, labels and values, but for Ray's prefix."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.processes import CHECKOUT
from tests.cluster.ray_scrape import SECOND
from tests.monitoring import SCRAPING

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """By name and labels, as Prometheus stores them with our example configuration."""
    jobs = yaml.safe_load(SCRAPING.read_text(encoding="utf-8"))["scrape_configs"]
    (rule,) = next(job for job in jobs if job["job_name"] == "paceline-ray")["metric_relabel_configs"]
    assert (rule["source_labels"], rule["target_label"], rule["replacement"]) == (["__name__"], "__name__", "$1")
    families: list[Metric] = list(text_string_to_metric_families(text))
    return {
        (re.sub(f"^(?:{rule['regex']})$", r"\1", sample.name), frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_ray_tells_what_the_router_tells() -> None:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "-m", "tests.cluster.ray_scrape"]
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told, scraped, later = (samples(text) for text in done.stdout.split("---\n"))
    ours = {(name, labels): value for (name, labels), value in scraped.items() if name.startswith("paceline_")}
    told = {(name, labels): value for (name, labels), value in told.items() if name.startswith("paceline_")}
    keys = {key for _, labels in told for key, _ in labels}
    assert {
        (name, frozenset(pair for pair in labels if pair[0] in keys)): v for (name, labels), v in ours.items()
    } == told
    kinds = {name for name, _ in told}
    assert {"paceline_generation_tokens_total", "paceline_inter_token_latency_seconds_bucket"} <= kinds
    gone = [labels for _, labels in later if ("worker", SECOND) in labels]
    assert not gone
