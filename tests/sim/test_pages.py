"""What pages print of the simulator is what it says now."""

from __future__ import annotations

import re
import shlex

import pytest

from cluster.cli import main
from cluster.config.environment import CHECKOUT
from cluster.doctor.workers import speedup

SIZE = (CHECKOUT / "docs" / "size.md").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_the_example_of_the_page_about_size(capsys):
    shown = re.search(r"```\n\$ paceline (simulate (?:[^\n]*\\\n)*[^\n]*)\n(.*?)```", SIZE, re.DOTALL)
    assert shown
    assert main(shlex.split(shown[1].replace("\\\n", ""))) == 0
    assert capsys.readouterr().out.split() == shown[2].split()


def test_what_doctor_says_of_a_distance_there():
    trips = re.findall(r"(?:target|draft) .* round trip ([\d.]+) ms, worst", SIZE)
    gain = speedup(0.030, 0.002, 0.8, sum(map(float, trips)) / 1000)
    assert f"make drafting {gain:.2f} times as fast" in SIZE
