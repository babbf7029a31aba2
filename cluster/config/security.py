"""What guards each door: certificates between routers and workers, API keys before the HTTP API.

Decides what may be listened on. Beyond this machine's loopback interface a door needs its guard, unless the operator
says that only trusted machines can connect.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config.config import Config
from cluster.console import BadInput, complain
from transport.address import is_loopback

if TYPE_CHECKING:  # they bring gRPC and HTTP libraries
    from router.http.auth import ApiKeys
    from transport.tls import Identity

ROLE = "{role}"
"""Stands in the paths of certificates for the role of the process that reads them."""


class SecurityError(BadInput):
    """A door that would be open, or a guard that cannot work. One line that says what would be right."""


def check_security(config: Config, roles: Iterable[str] = ()) -> None:
    """Check the API keys and these roles' certificates; says which ends soon. Raises :class:`SecurityError`."""
    api_keys(config)
    _has_tls(config)  # or a part of it
    for role in roles:
        known = identity(config, role)
        if known is not None and (warning := known.warning()):
            complain(f"paceline: {role}: {warning}")


def identity(config: Config, role: str) -> Identity | None:
    """Who a process with this role is to the others; None without TLS. Raises :class:`SecurityError`."""
    if not _has_tls(config):
        return None
    from transport.tls import Identity, TlsError, TlsFiles

    security = config.security
    paths = (Path(text.replace(ROLE, role)) for text in (security.certificate, security.key, security.authority))
    try:
        return Identity(TlsFiles(*paths), role)
    except TlsError as error:
        raise SecurityError(f"security.{error}") from error


def api_keys(config: Config) -> ApiKeys | None:
    """Who may use the API; None: everybody. Raises :class:`SecurityError`."""
    if not config.security.api_keys:
        return None
    from router.http.auth import ApiKeys, KeyFileError

    try:
        return ApiKeys(Path(config.security.api_keys))
    except KeyFileError as error:
        raise SecurityError(f"security.api_keys {error}") from error


def own_api_key(config: Config) -> str:
    """A key for requests to ourselves; empty where none is needed. Raises :class:`SecurityError`."""
    path = config.security.api_keys
    return first_key(Path(path), "security.api_keys") if path else ""


def first_key(path: Path, named: str) -> str:
    """The first key in a file, which was ``named`` by a setting or a flag. Raises :class:`SecurityError`."""
    from router.http.auth import KeyFileError, read_keys

    try:
        return next(iter(read_keys(path)))
    except KeyFileError as error:
        raise SecurityError(f"{named} {error}") from error


def check_worker_exposure(host: str, config: Config) -> None:
    """Whether a worker may listen on this interface. Raises :class:`SecurityError`."""
    if not (is_loopback(host) or config.router.allow_remote or _has_tls(config)):
        raise SecurityError(
            f"{host} can be reached from other machines and there is no authentication; listen on 127.0.0.1, "
            "give certificates (--certificate, --key, --authority; `paceline certs` makes some), "
            "or add --allow-remote if only trusted machines can connect"
        )


def check_http_exposure(config: Config, host: str = "") -> None:
    """Whether HTTP may be served on this interface, or where the configuration says. Raises :class:`SecurityError`."""
    host = host or config.router.host
    if not (is_loopback(host) or config.router.allow_remote or config.security.api_keys):
        raise SecurityError(
            f"{host} can be reached from other machines and there is no authentication; listen on 127.0.0.1, "
            "give a file of API keys (--api-keys), or add --allow-remote if only trusted machines can connect"
        )


def _has_tls(config: Config) -> bool:
    """Whether there is TLS. Raises :class:`SecurityError` for a part of it."""
    security = config.security
    parts = {"certificate": security.certificate, "key": security.key, "authority": security.authority}
    missing = [f"security.{name}" for name, path in parts.items() if not path]
    if missing and len(missing) < len(parts):
        why = "certificate, key and authority belong together"
        raise SecurityError(f"{' and '.join(missing)} must be given as well: {why}")
    return not missing
