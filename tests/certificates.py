"""Certificates for tests: right ones from our own issuer, and wrong ones that their holder uses all the same."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from cluster.certificates import BACKDATED, Issued, begun, issue, new_authority, now, write_authority, write_roles
from transport.tls import Credentials, Identity, TlsFiles


@dataclass(frozen=True)
class Authority:
    """An authority with certificates of all roles in a folder."""

    folder: Path
    issued: Issued

    @classmethod
    def made(cls, folder: Path) -> Authority:
        """A new one, in a new folder."""
        folder.mkdir(parents=True)
        issued = new_authority(now())
        write_authority(folder, issued)
        write_roles(folder, issued, now())
        return cls(folder, issued)

    def files(self, role: str) -> TlsFiles:
        """Of a role."""
        return TlsFiles(self.folder / f"{role}.crt", self.folder / f"{role}.key", self.folder / "ca.crt")

    def identity(self, role: str) -> Identity:
        """Of a role, as a process has it."""
        return Identity(self.files(role), role)

    def held(self, role: str, age: timedelta = timedelta(), *, trusting: Authority | None = None) -> Held:
        """A certificate of a role, issued that long ago for a day, with a holder who may trust another authority."""
        return Held(issue(self.issued, role, now() - age, timedelta(days=1)), trusting or self)

    def held_for(self, *names: str) -> Held:
        """A router's certificate in everything but its names."""
        issued = issue(self.issued, "router", now())
        return Held(Issued(_renamed(issued.certificate, issued.key, names, self.issued), issued.key), self)


class Held(Identity):
    """Who uses a certificate without looking at it."""

    def __init__(self, issued: Issued, trusted: Authority) -> None:
        certificate = issued.certificate
        times = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        self._given = Credentials(issued.certificate_pem, issued.key_pem, trusted.issued.certificate_pem, *times)

    def current(self) -> Credentials:
        return self._given


def _renamed(
    certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, names: tuple[str, ...], signer: Issued
) -> x509.Certificate:
    begins, ends = certificate.not_valid_before_utc + BACKDATED, certificate.not_valid_after_utc
    builder = begun(certificate.subject, certificate.issuer, key, begins, ends)
    for extension in certificate.extensions:
        if not isinstance(extension.value, x509.SubjectAlternativeName | x509.SubjectKeyIdentifier):
            builder = builder.add_extension(extension.value, extension.critical)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), False)
    return builder.sign(signer.key, hashes.SHA256())
