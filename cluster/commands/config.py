"""``paceline config``: the effective configuration."""

from __future__ import annotations

import argparse

from cluster.config.flags import add_file, configuration
from cluster.console import write

ABOUT = "print the effective configuration as YAML"
DETAILS = """\
Everything that can be set, with the values that a file and flags amount to. The output is itself a
configuration file:

  paceline config > paceline.yaml
  paceline config --config paceline.yaml --set target.replicas=2
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    add_file(parser)


def run(args: argparse.Namespace) -> int:
    """Print it."""
    write(configuration(args).to_yaml())
    return 0
