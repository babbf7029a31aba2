"""Certificates for tests of the doctor: an authority, and what it issues, sound or with a fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from cluster.certificates import BACKDATED, Issued, begun, named

YEAR = timedelta(days=365)


def make_authority(now: datetime, life: timedelta = 10 * YEAR) -> Issued:
    """One of its own, valid for years; all have the same name, as an authority made anew has."""
    return _signed("test authority", None, now - YEAR, now + life, [(x509.BasicConstraints(True, 1), True)])


def make_intermediate(above: Issued, begins: datetime, ends: datetime) -> Issued:
    """One that another authority signed."""
    return _signed("test intermediate", above, begins, ends, [(x509.BasicConstraints(True, 0), True)])


def issue(by: Issued, begins: datetime, ends: datetime, *, names: Sequence[str] = ("router.paceline",)) -> Issued:
    """A certificate for client auth, as a router has one."""
    said: list[tuple[x509.ExtensionType, bool]] = [(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), False)]
    said += [(x509.SubjectAlternativeName(list(map(x509.DNSName, names))), False)] if names else []
    return _signed("test part", by, begins, ends, said)


def write(folder: Path, issued: Issued, authority: Issued) -> tuple[Path, Path, Path]:
    """Certificate, key and authority as cert-manager lays them out."""
    contents = {"tls.crt": issued.certificate_pem, "tls.key": issued.key_pem, "ca.crt": authority.certificate_pem}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder / "tls.crt", folder / "tls.key", folder / "ca.crt"


def _signed(
    name: str,
    signer: Issued | None,
    begins: datetime,
    ends: datetime,
    extensions: Iterable[tuple[x509.ExtensionType, bool]],
) -> Issued:
    """By itself where there is no signer."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = signer.certificate.subject if signer else named(name)
    builder = begun(named(name), issuer, key, begins + BACKDATED, ends)
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return Issued(builder.sign(signer.key if signer else key, hashes.SHA256()), key)
