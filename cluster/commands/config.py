"""``paceline config``: the effective configuration."""

from __future__ import annotations

import argparse
import sys

from cluster.config.flags import add_file, configuration

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
    sys.stdout.write(configuration(args).to_yaml())
    return 0
