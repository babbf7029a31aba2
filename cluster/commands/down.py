"""``paceline down``: remove what ``paceline up --detach`` left running on a Ray cluster."""

from __future__ import annotations

import argparse

from cluster.config.flags import add_file, add_setting, configuration
from cluster.console import BadInput, say, stages

ABOUT = "remove Paceline from a Ray cluster, after `paceline up --detach`"
DETAILS = """\
Ends its workers, and its routers once their streams have ended, within router.drain_timeout. Ray itself, and what else
is served there, stay.

  paceline down --address auto
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    about = "the running Ray cluster: auto or HOST:PORT (default: ray.address of --config)"
    add_setting(parser, "--address", "ray.address", about=about)
    add_file(parser)


def run(args: argparse.Namespace) -> int:
    """Remove it."""
    config = configuration(args)
    if config.ray.address == "local":
        raise BadInput("give the Ray cluster: --address auto or --address HOST:PORT")
    from cluster.ray.cluster import remove

    with stages() as report:
        report(f"removing Paceline from Ray at {config.ray.address}")
        remove(config, report)
    say(f"Paceline is removed from Ray at {config.ray.address}")
    return 0
