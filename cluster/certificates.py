"""A certificate authority for development, and the certificates that it signs for each role.

In production whoever signs for the organisation does this; :mod:`transport.tls` says what a certificate needs. Keys are
not protected by a password, only by who may read the folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cluster.config.environment import replace_file
from cluster.console import BadInput
from transport.tls import ROLES, name_of

AUTHORITY_LIFE = timedelta(days=3650)
LIFE = timedelta(days=90)
BACKDATED = timedelta(minutes=10)
"""Clocks of other machines may be behind."""
REDIS = "redis"
AUTHORITY = "ca"
"""Its files are ``ca.crt`` and ``ca.key``; those of a role ``target.crt`` and ``target.key``."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate with its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        """As files have it."""
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """As files have it."""
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def new_authority(now: datetime, life: timedelta = AUTHORITY_LIFE) -> Issued:
    """An authority that signs for roles, and for no other authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = named("Paceline development CA")
    builder = begun(name, name, key, now, now + life).add_extension(x509.BasicConstraints(True, 0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return Issued(builder.sign(key, hashes.SHA256()), key)


def issue(authority: Issued, role: str, now: datetime, life: timedelta = LIFE) -> Issued:
    """A certificate of a role; it ends with the authority's at the latest."""
    key = ec.generate_private_key(ec.SECP256R1())
    signer = authority.certificate
    ends = min(now + life, signer.not_valid_after_utc)
    purpose = ExtendedKeyUsageOID.CLIENT_AUTH if role == "router" else ExtendedKeyUsageOID.SERVER_AUTH
    signer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = (
        begun(named(f"Paceline {role}"), signer.subject, key, now, ends)
        .add_extension(x509.BasicConstraints(False, None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name_of(role))]), critical=False)
        .add_extension(signer_id, critical=False)
    )
    return Issued(builder.sign(authority.key, hashes.SHA256()), key)


def read_authority(folder: Path, now: datetime) -> Issued:
    """The authority in a folder. Raises :class:`BadInput`, which names the file."""
    certificate_path, key_path = folder / f"{AUTHORITY}.crt", folder / f"{AUTHORITY}.key"
    try:
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        key = load_pem_private_key(key_path.read_bytes(), password=None)
    except OSError as error:
        raise BadInput(f"{error.filename}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise BadInput(f"{certificate_path} and {key_path}: not a certificate and its key in PEM") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise BadInput(f"{key_path}: is not the key of {certificate_path}")
    if now >= certificate.not_valid_after_utc:
        raise BadInput(f"{certificate_path}: has expired; make a new one in another folder")
    return Issued(certificate, key)


def write_authority(folder: Path, authority: Issued) -> None:
    """Into a folder that has none. Raises :class:`BadInput`, OSError."""
    existing = [path for suffix in ("crt", "key") if (path := folder / f"{AUTHORITY}.{suffix}").exists()]
    if existing:
        raise BadInput(f"{existing[0]}: is there already; --renew keeps it and makes new certificates for all roles")
    _write(folder, AUTHORITY, authority)


def write_roles(folder: Path, authority: Issued, now: datetime, life: timedelta = LIFE) -> None:
    """New certificates of all roles and of the Redis behind Ray's head, each file replaced at once. Raises OSError.

    That of Redis, which reads it when it starts and not again, lives as long as the authority whatever ``life`` is.
    """
    for role in ROLES:
        _write(folder, role, issue(authority, role, now, life))
    _write(folder, REDIS, issue(authority, REDIS, now, AUTHORITY_LIFE))


def now() -> datetime:
    """The time that certificates count in."""
    return datetime.now(UTC)


def _write(folder: Path, name: str, issued: Issued) -> None:
    replace_file(folder / f"{name}.key", issued.key_pem, 0o600)
    replace_file(folder / f"{name}.crt", issued.certificate_pem, 0o644)


def begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, ends: datetime
) -> x509.CertificateBuilder:
    """One to be extended and signed; it is valid somewhat before ``now``, for clocks that are behind."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def named(common: str) -> x509.Name:
    """Whom a certificate is for."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
