"""Mutual TLS between routers and workers: who this process is, and whom it talks to.

A certificate names its role as a DNS name among its subject alternative names: ``router.paceline``,
``target.paceline`` or ``draft.paceline``. Addresses are not named, so workers may come up anywhere. A router talks to
a worker only if its certificate names the role that is expected there; a worker answers only a certificate that names
``router.paceline``. Both trust what one authority signed, which therefore should sign for nothing else.

Files are read again at every handshake: a certificate that was renewed, or another authority, counts for the next
connection, and streams that run go on. Files that cannot be used are reported, and those read before stay in use.

Whoever issues certificates has to give them the key usage *digital signature* and the extended key usage *server auth*
for workers, *client auth* for routers; see :mod:`cluster.certificates` for development and, in a cluster, cert-manager
with ``dnsNames: [target.paceline]`` and ``usages: [digital signature, server auth]``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import load_pem_private_key

log = logging.getLogger(__name__)

ROLES = ("router", "target", "draft")
SOON = timedelta(days=3)
"""Less than this is left of a certificate that should have been renewed, unless it lives for days only."""
SETTLED = 0.1
"""Seconds that a renewal waits for handshakes that have just begun: gRPC frees the certificates in use as soon as
others are given, and a handshake that begins on another thread may be about to read them (grpc/grpc#36693)."""
TARGET_NAME = "grpc.ssl_target_name_override"
_UNREADABLE = (
    ValueError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""What cryptography raises for damaged certificates."""


class TlsError(Exception):
    """Certificates that cannot be used. One line that names the kind of file, the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where a process finds what it needs, each in PEM."""

    certificate: Path
    """Its own, followed by those between it and the authority, if any."""
    key: Path
    authority: Path
    """The certificates of whoever may sign; more than one while the authority changes."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the files said, found to fit together and valid."""

    chain: bytes
    key: bytes
    authority: bytes
    begins: datetime
    ends: datetime


def name_of(role: str) -> str:
    """What a certificate of this role has among its DNS names."""
    return f"{role}.paceline"


def read(files: TlsFiles, role: str, now: datetime) -> Credentials:
    """Read and examine the files of a process with this role. Raises :class:`TlsError`."""
    chain_pem, key_pem = content("certificate", files.certificate), content("key", files.key)
    authority_pem = content("authority", files.authority)
    own, *between = certificates_in("certificate", files.certificate, chain_pem)
    authorities = certificates_in("authority", files.authority, authority_pem)
    where = f"certificate {files.certificate}"
    if public_key(files.key, key_pem) != own.public_key():
        raise TlsError(f"key {files.key}: is not the key of the certificate {files.certificate}")
    for signed in (own, *between):
        _check_time(where, signed, now)
    if name_of(role) not in (names := dns_names(own)):
        raise TlsError(f"{where}: is for {_listed(names)}; a {role} needs one for {name_of(role)}")
    if not any(valid(signer, now) for signer in signers(own, between, authorities)):
        raise TlsError(f"{where}: was not signed by the authority {files.authority}, or that has expired")
    return Credentials(chain_pem, key_pem, authority_pem, own.not_valid_before_utc, own.not_valid_after_utc)


class Identity:
    """A process's side of every handshake, as its files say at the time. May be used from any thread."""

    def __init__(self, files: TlsFiles, role: str, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Reads the files; raises :class:`TlsError`."""
        self._files, self._role, self._clock = files, role, clock
        self._held = read(files, role, clock())
        self._told = ""

    @property
    def certificates(self) -> tuple[Path, Path]:
        """The files of its own certificate and of those that it trusts."""
        return self._files.certificate, self._files.authority

    def current(self) -> Credentials:
        """What the files say now or, while they cannot be used, what they said before."""
        try:
            self._held, self._told = read(self._files, self._role, self._clock()), ""
        except TlsError as error:
            if str(error) != self._told:
                self._told = str(error)
                log.error("%s; what was read before stays in use", error)
        return self._held

    def warning(self) -> str:
        """That the certificate should have been renewed by now; nothing, if so."""
        begins, ends = self._held.begins, self._held.ends
        left = ends - self._clock()
        late = left < min(SOON, (ends - begins) / 5)
        return f"the certificate ends on {_shown(ends)}, {left / timedelta(hours=1):.0f} hours from now" if late else ""

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a worker's server: whoever connects has to show a certificate."""
        given = self.current()

        def configuration() -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration([(given.key, given.chain)], given.authority)

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            if (now := self.current()) == given:
                return None  # gRPC keeps what it has: given anew at every handshake, the process crashes
            given = now
            time.sleep(SETTLED)
            return configuration()

        return grpc.dynamic_ssl_server_credentials(
            configuration(),
            renewed,  # type: ignore[arg-type]  # grpc: "or None if no change"
            require_client_authentication=True,
        )

    def channel(self, address: str, role: str, options: Sequence[tuple[str, str | int]]) -> grpc.aio.Channel:
        """A router's channel to what has to be a worker of this role."""
        now = self.current()
        credentials = grpc.ssl_channel_credentials(now.authority, now.key, now.chain)
        return grpc.aio.secure_channel(address, credentials, [*options, (TARGET_NAME, name_of(role))])


def objection_to(auth_context: Mapping[str, Iterable[bytes]]) -> str:
    """Why a worker does not serve the peer of this gRPC context; nothing, if it is a router."""
    names = [name.decode(errors="replace") for name in auth_context.get("peer_dns", ())]
    if name_of("router") in names:
        return ""
    return f"its certificate is for {_listed(names)}, not for {name_of('router')}"


def content(kind: str, path: Path) -> bytes:
    """Of a file. Raises :class:`TlsError`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{kind} {path}: cannot be read: {error.strerror or error}") from error


def certificates_in(kind: str, path: Path, pem: bytes) -> list[x509.Certificate]:
    """All in a file, at least one, with keys and extensions that can be read. Raises :class:`TlsError`."""
    try:
        found = x509.load_pem_x509_certificates(pem)
        for certificate in found:
            certificate.public_key(), certificate.extensions
    except _UNREADABLE as error:
        raise TlsError(f"{kind} {path}: holds no certificate in PEM that can be read") from error
    return found


def public_key(path: Path, pem: bytes) -> PublicKeyTypes:
    """What belongs to a private key. Raises :class:`TlsError`."""
    try:
        return load_pem_private_key(pem, password=None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise TlsError(f"key {path}: holds no private key in PEM without a password") from error


def _check_time(where: str, certificate: x509.Certificate, now: datetime) -> None:
    if now >= certificate.not_valid_after_utc:
        raise TlsError(f"{where}: has expired on {_shown(certificate.not_valid_after_utc)}; renew it")
    if now < certificate.not_valid_before_utc:
        raise TlsError(f"{where}: is not valid before {_shown(certificate.not_valid_before_utc)}; see the clock")


def dns_names(certificate: x509.Certificate) -> list[str]:
    """Those among its subject alternative names."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.DNSName)


def signers(
    own: x509.Certificate, between: Iterable[x509.Certificate], authorities: Iterable[x509.Certificate]
) -> list[x509.Certificate]:
    """The authorities, valid or not, that signed the last of a chain; none where one was not signed by the next."""
    last = own
    for issuer in between:
        if not _signed(last, issuer):
            return []
        last = issuer
    return [authority for authority in authorities if _signed(last, authority)]


def valid(certificate: x509.Certificate, now: datetime) -> bool:
    """Whether it holds at this time."""
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def _signed(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "no DNS name"


def _shown(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"
