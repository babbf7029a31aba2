"""``paceline certs``: certificates for development."""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path

from cluster.console import BadInput, say

ABOUT = "make a development CA, and certificates for routers, targets and drafts"
DETAILS = """\
With certificates, routers and workers speak TLS and know each other by it. Running processes take renewed ones
at the next connection. In production, use your own authority or cert-manager.

  paceline certs ./certs
  paceline certs ./certs --renew        new certificates, same CA
"""
DAYS = 90


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to put them; made if it is not there")
    parser.add_argument("--renew", action="store_true", help="keep the CA that is there and sign new certificates")
    about = f"how long certificates are valid, but for Redis': as long as the CA (default: {DAYS})"
    parser.add_argument("--days", type=int, default=DAYS, metavar="N", help=about)


def run(args: argparse.Namespace) -> int:
    """Make them and say how to use them."""
    from cluster.certificates import new_authority, now, read_authority, write_authority, write_roles

    if not 1 <= args.days <= 3650:
        raise BadInput(f"--days must be a whole number from 1 to 3650, got {args.days}")
    folder: Path = args.folder
    try:
        if args.renew:
            authority = read_authority(folder, now())
        else:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            authority = new_authority(now())
            write_authority(folder, authority)
        write_roles(folder, authority, now(), timedelta(days=args.days))
    except OSError as error:
        raise BadInput(f"cannot write to {folder}: {error.strerror or error}") from error
    folder = folder.resolve()
    say(
        f"""\
Certificates for router, target, draft and redis are in {folder}; keep its *.key files to yourself.
Use them with these settings; {{role}} stands for the role of the process that reads them:
security:
  certificate: {folder}/{{role}}.crt
  key: {folder}/{{role}}.key
  authority: {folder}/ca.crt"""
    )
    return 0
