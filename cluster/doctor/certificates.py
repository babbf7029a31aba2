"""Certificate, key and authority of the connections between our parts: there, matching, and valid for a while.

A certificate names the role of its holder among its DNS names: ``router.paceline``, ``target.paceline`` ...
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from cluster.config.security import ROLE
from cluster.doctor.finding import Finding, ok, problem, warning
from transport.tls import TlsError, certificates_in, content, dns_names, name_of, public_key, signers, valid

SUBJECT = "certificate"
SOON = timedelta(days=14)
SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
USES = {"router": (CLIENT, "client auth"), "target": (SERVER, "server auth"), "draft": (SERVER, "server auth")}
"""What a role does: workers answer, routers connect."""


def check_all(certificate: str, key: str, authority: str) -> Iterator[Finding]:
    """Those of all roles that are on this machine, where the paths name the role; else the one that they name."""
    paths = (certificate, key, authority)
    sets = [[Path(path.replace(ROLE, role)) for path in paths] for role in (USES if ROLE in certificate else ("",))]
    for own, private, signer in [files for files in sets if files[0].exists()] or sets[:1]:
        yield from check(own, private, signer, datetime.now(UTC))


def check(certificate: Path, key: Path, authority: Path, now: datetime) -> Iterator[Finding]:
    """All that can be known of the three files without connecting anywhere."""
    try:
        own, *between = certificates_in("certificate", certificate, content("certificate", certificate))
        authorities = certificates_in("authority", authority, content("authority", authority))
        of_key = public_key(key, content("key", key))
    except TlsError as error:
        text = str(error).removeprefix(f"{SUBJECT} ")
        yield problem(SUBJECT, text, "write it again; `security` in the configuration names the files")
        return
    faults = [finding for one in (own, *between) for finding in _validity(certificate, one, now)]
    faults += _check_uses(certificate, own)
    if own.public_key() != of_key:
        text = f"{key} is not the key of {certificate}"
        faults.append(problem(SUBJECT, text, "mount certificate and key of the same Secret, or make both again"))
    trusted = signers(own, between, authorities)
    if trusted:
        best = max(trusted, key=lambda one: (valid(one, now), one.not_valid_after_utc))
        faults += _validity(authority, best, now)
    else:
        text = f"{certificate} was not issued by {authority}"
        faults.append(problem(SUBJECT, text, "all parts need certificates of one authority; sign it with this one"))
    yield from faults
    if not faults:
        yield ok(SUBJECT, f"{certificate} is valid for another {(own.not_valid_after_utc - now).days} days")


def _validity(file: Path, certificate: x509.Certificate, now: datetime) -> Iterator[Finding]:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now >= ends:
        yield problem(SUBJECT, f"{file} expired at {ends:%Y-%m-%d %H:%M} UTC", "renew it; it is read again by itself")
    elif now < begins:
        text = f"{file} is valid only from {begins:%Y-%m-%d %H:%M} UTC on"
        yield problem(SUBJECT, text, "check this machine's clock")
    elif ends - now < SOON:
        text = f"{file} expires in {(ends - now).days} days"
        yield warning(SUBJECT, text, "renew it; see whether cert-manager does")


def _check_uses(file: Path, certificate: x509.Certificate) -> Iterator[Finding]:
    """Whether it names a role, and may be used for what that does."""
    names = dns_names(certificate)
    roles = [role for role in USES if name_of(role) in names]
    if not roles:
        text = f"{file} names {', '.join(names) or 'nobody'}, and so no role"
        yield problem(SUBJECT, text, f"issue it for one of {', '.join(map(name_of, USES))}")
    try:
        allowed = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return  # then it may be used for anything
    for role in roles:
        use, name = USES[role]
        if use not in allowed:
            yield problem(SUBJECT, f"{file} is for a {role} and not meant for {name}", f"issue it for {name}")
