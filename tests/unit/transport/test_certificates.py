"""Certificate files: what is made, what is taken, and what is said of the rest."""

from __future__ import annotations

import base64
import random
import shutil
import stat
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.x509 import load_pem_x509_certificate

from cluster.certificates import (
    REDIS,
    issue,
    new_authority,
    now,
    read_authority,
    write_authority,
    write_roles,
)
from cluster.console import BadInput
from tests.certificates import Authority
from transport.tls import ROLES, Identity, TlsError, read


@pytest.fixture
def ours(tmp_path) -> Authority:
    return Authority.made(tmp_path / "ours")


def refusal(authority: Authority, role: str = "target", at: datetime | None = None) -> str:
    with pytest.raises(TlsError) as caught:
        read(authority.files(role), role, at or now())
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{authority.folder}/", "")


def test_what_is_made_fits_every_role_and_keys_are_private(ours):
    for role in ROLES:
        read(ours.files(role), role, now())
    for path in ours.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.suffix == ".key" else 0o644)


@pytest.mark.parametrize("kind", ["certificate", "key", "authority"])
def test_a_file_that_is_missing_or_something_else_is_named(ours, kind):
    path = getattr(ours.files("target"), kind)
    path.write_text("-----BEGIN nothing")
    what = "private key in PEM without a password" if kind == "key" else "certificate in PEM that can be read"
    assert refusal(ours) == f"{kind} {path.name}: holds no {what}"
    path.unlink()
    assert refusal(ours) == f"{kind} {path.name}: cannot be read: No such file or directory"


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_no_damage_to_a_file_is_more_than_a_line(ours):
    seed = 5
    rng = random.Random(seed)
    for number in range(600):
        path = getattr(ours.files("target"), rng.choice(["certificate", "key", "authority"]))
        whole = path.read_bytes()
        begin, *lines, end = whole.splitlines(keepends=True)
        damaged = bytearray(base64.b64decode(b"".join(lines)))
        for _ in range(rng.choice([1, 2, 5])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(begin + base64.encodebytes(damaged) + end)
        try:
            read(ours.files("target"), "target", now())
        except TlsError:
            pass
        except Exception as error:
            raise AssertionError(f"seed {seed}, file {number} ({path.name})") from error
        path.write_bytes(whole)


def test_files_that_do_not_fit_together_are_refused(ours, tmp_path):
    theirs = Authority.made(tmp_path / "theirs")
    shutil.copy(theirs.folder / "target.key", ours.folder)
    assert refusal(ours) == "key target.key: is not the key of the certificate target.crt"
    shutil.copy(theirs.folder / "target.crt", ours.folder)
    assert refusal(ours) == "certificate target.crt: was not signed by the authority ca.crt, or that has expired"
    with (ours.folder / "ca.crt").open("ab") as file:  # both are trusted while one follows the other
        file.write(theirs.issued.certificate_pem)
    for role in ROLES:
        read(ours.files(role), role, now())


def test_a_certificate_of_another_role_is_refused(ours):
    with pytest.raises(TlsError, match=r"is for router\.paceline; a draft needs one for draft\.paceline"):
        read(ours.files("router"), "draft", now())


def test_time_is_told(ours):
    ends = read(ours.files("target"), "target", now()).ends
    assert refusal(ours, at=ends) == f"certificate target.crt: has expired on {ends:%Y-%m-%d %H:%M} UTC; renew it"
    read(ours.files("target"), "target", ends - timedelta(seconds=1))
    assert "is not valid before" in refusal(ours, at=now() - timedelta(days=1))


@pytest.mark.parametrize(("days", "left", "warns"), [(90, 4, False), (90, 2.9, True), (1, 0.5, False), (1, 0.1, True)])
def test_a_certificate_that_should_have_been_renewed_is_told(ours, days, left, warns):
    made = now()
    write_roles(ours.folder, ours.issued, made, timedelta(days=days))
    identity = Identity(ours.files("target"), "target", lambda: made + timedelta(days=days - left))
    assert identity.warning().startswith("the certificate ends on ") is warns


def test_an_intermediate_authority_may_stand_between(ours):
    leaf = issue(ours.issued, "target", now())
    root = new_authority(now())
    assert leaf.certificate.issuer == ours.issued.certificate.subject
    (ours.folder / "target.crt").write_bytes(leaf.certificate_pem + root.certificate_pem)
    (ours.folder / "target.key").write_bytes(leaf.key_pem)
    assert "was not signed by the authority" in refusal(ours)  # the second did not sign the first
    (ours.folder / "target.crt").write_bytes(leaf.certificate_pem + ours.issued.certificate_pem)
    read(ours.files("target"), "target", now())


def test_no_certificate_outlives_its_authority():
    made = datetime(2026, 1, 1, tzinfo=UTC)
    authority = new_authority(made, timedelta(days=10))
    assert issue(authority, "draft", made, timedelta(days=90)).certificate.not_valid_after_utc == made + timedelta(10)


def test_the_certificate_of_redis_lives_as_long_as_the_authority(ours):
    """Redis does not read it again."""
    write_roles(ours.folder, ours.issued, now(), timedelta(days=1))
    redis = load_pem_x509_certificate((ours.folder / f"{REDIS}.crt").read_bytes())
    assert redis.not_valid_after_utc == ours.issued.certificate.not_valid_after_utc


def test_an_authority_is_kept_and_never_overwritten(ours):
    kept = read_authority(ours.folder, now())
    assert kept.certificate == ours.issued.certificate
    with pytest.raises(BadInput, match="is there already; --renew keeps it"):
        write_authority(ours.folder, new_authority(now()))
    (ours.folder / "ca.crt").unlink()
    with pytest.raises(BadInput, match=r"ca\.key: is there already"):
        write_authority(ours.folder, new_authority(now()))
    with pytest.raises(BadInput, match=r"ca\.crt: cannot be read: No such file"):
        read_authority(ours.folder, now())


def test_an_authority_of_no_use_is_refused(ours, tmp_path):
    with pytest.raises(BadInput, match=r"ca\.crt: has expired"):
        read_authority(ours.folder, now() + timedelta(days=5000))
    shutil.copy(Authority.made(tmp_path / "theirs").folder / "ca.key", ours.folder)
    with pytest.raises(BadInput, match=r"ca\.key: is not the key of "):
        read_authority(ours.folder, now())
    (ours.folder / "ca.key").write_text("rubbish")
    with pytest.raises(BadInput, match="not a certificate and its key in PEM"):
        read_authority(ours.folder, now())
