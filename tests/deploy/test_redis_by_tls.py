"""Ray's own client of Redis, by the variable that our manifests set: TLS, with whom an authority signed for alone."""

import os
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cluster.certificates import REDIS, new_authority, now, write_authority, write_roles
from deploy.ray_rules import AUTHORITY

PASSWORD = "0badf00d0badf00d"
CLEANUP = f"""
import sys
from ray._private.gcs_utils import cleanup_redis_storage
cleanup_redis_storage("127.0.0.1", int(sys.argv[1]), "{PASSWORD}", True, "one")
"""
"""As KubeRay's Job calls it when a cluster is deleted; Ray's head has the same client."""
SECONDS = 120


class Redis:
    """Listens by TLS, for one connection, and hears the first command."""

    def __init__(self, folder: Path) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / f"{REDIS}.crt", folder / f"{REDIS}.key")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(SECONDS)
        self.port = self._listening.getsockname()[1]
        self.heard: list[bytes] = []
        self.refused = ""
        self._thread = threading.Thread(target=self._hear)
        self._thread.start()

    def _hear(self) -> None:
        try:
            with self._listening.accept()[0] as plain, self._context.wrap_socket(plain, server_side=True) as stream:
                with stream.makefile("rb") as said:
                    for _ in range(int(said.readline()[1:])):
                        said.readline()  # its length
                        self.heard.append(said.readline().rstrip())
        except ssl.SSLError as error:
            self.refused = error.reason

    def __enter__(self) -> "Redis":
        return self

    def __exit__(self, *_error: object) -> None:
        self._thread.join(SECONDS)
        self._listening.close()


def authority(folder: Path) -> Path:
    folder.mkdir()
    issued = new_authority(now())
    write_authority(folder, issued)
    write_roles(folder, issued, now())
    return folder


def ask(port: int, trusted: Path) -> None:
    """Ends badly either way, since this Redis says nothing."""
    quick = {"RAY_redis_db_connect_retries": "1", "RAY_redis_db_connect_wait_milliseconds": "1"}
    environment = {**os.environ, **quick, AUTHORITY: str(trusted / "ca.crt")}
    command = [sys.executable, "-c", CLEANUP, str(port)]
    assert subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS).returncode != 0


@pytest.mark.parametrize("own", [True, False], ids=["its authority", "another"])
def test_ray_tells_its_password_by_tls_to_the_right_redis_alone(tmp_path: Path, own: bool) -> None:
    signed, other = authority(tmp_path / "signed"), authority(tmp_path / "other")
    with Redis(signed) as redis:
        ask(redis.port, signed if own else other)
    assert redis.heard == ([b"AUTH", PASSWORD.encode()] if own else [])
    assert ("UNKNOWN_CA" in redis.refused) == (not own)
