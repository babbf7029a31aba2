"""Certificates for tests: an authority, and what it issues, sound or with a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

YEAR = timedelta(days=365)


@dataclass(frozen=True)
class Authority:
    """Signs certificates."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_authority(now: datetime, life: timedelta = 10 * YEAR) -> Authority:
    """One of its own, valid for years; all have the same name, as an authority made anew has."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("test authority")
    builder = _builder(name, name, key, now - YEAR, now + life)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
    return Authority(builder.sign(key, hashes.SHA256()), key)


def make_intermediate(above: Authority, begins: datetime, ends: datetime) -> Authority:
    """One that another authority signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_name("test intermediate"), above.certificate.subject, key, begins, ends)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return Authority(builder.sign(above.key, hashes.SHA256()), key)


def issue(
    authority: Authority, begins: datetime, ends: datetime, *, names: Sequence[str] = ("router.paceline",)
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A certificate for client auth, as a router has one."""
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = _builder(_name("test part"), authority.certificate.subject, key, begins, ends)
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(list(map(x509.DNSName, names))), critical=False)
    return builder.sign(authority.key, hashes.SHA256()), key


def write(
    folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, authority: Authority
) -> tuple[Path, Path, Path]:
    """Certificate, key and authority as cert-manager lays them out."""
    files = folder / "tls.crt", folder / "tls.key", folder / "ca.crt"
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    contents = (
        certificate.public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain),
        authority.certificate.public_bytes(pem),
    )
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    return files


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, begins: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
    )
