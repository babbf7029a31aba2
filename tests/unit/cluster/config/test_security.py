"""Which doors may be open where, and that settings for guards are whole and usable before anything starts."""

from __future__ import annotations

from concurrent import futures

import grpc
import pytest

from cluster.config.checks import check_listen
from cluster.config.config import Config, load
from cluster.config.security import (
    SecurityError,
    api_keys,
    check_http_exposure,
    check_security,
    check_worker_exposure,
    identity,
    own_api_key,
)
from cluster.config.settings import Override
from cluster.console import CommandError
from cluster.ray.connection import answers_anyone, check_token
from tests.certificates import Authority

TLS = {"security.certificate": "/c.crt", "security.key": "/c.key", "security.authority": "/ca.crt"}
KEYS = {"security.api_keys": "/keys"}
ALLOWED = {"router.allow_remote": "true"}


def configured(settings: dict[str, str]) -> Config:
    return load(None, [Override(key, text, "--set") for key, text in settings.items()])


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> dict[str, str]:
    folder = Authority.made(tmp_path_factory.mktemp("certs") / "certs").folder
    paths = {"certificate": "{role}.crt", "key": "{role}.key", "authority": "ca.crt"}
    return {f"security.{name}": f"{folder}/{path}" for name, path in paths.items()}


@pytest.mark.parametrize(
    ("settings", "worker", "http"),
    [({}, False, False), (TLS, True, False), (KEYS, False, True), (TLS | KEYS, True, True), (ALLOWED, True, True)],
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_beyond_loopback_a_door_needs_its_guard(settings, worker, http, host):
    config = configured(settings | {"router.host": host})
    for allowed, check in (
        (worker, lambda: check_worker_exposure(host, config)),
        (http, lambda: check_http_exposure(config)),
    ):
        if allowed:
            check()
        else:
            with pytest.raises(SecurityError, match=f"^{host} can be reached .*--allow-remote"):
                check()


def test_what_would_be_right_is_named():
    config = configured({"router.host": "192.0.2.1"})
    with pytest.raises(SecurityError, match="--api-keys"):
        check_http_exposure(config)
    with pytest.raises(SecurityError, match="--certificate, --key, --authority"):
        check_listen("192.0.2.1:7001", config)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.20", "::1", "localhost"])
def test_loopback_needs_no_guard(host):
    config = configured({"router.host": host})
    check_http_exposure(config)
    check_worker_exposure(host, config)


@pytest.mark.parametrize("given", [{"certificate"}, {"certificate", "key"}, {"authority"}])
def test_half_of_tls_is_none(given):
    config = configured({key: text for key, text in TLS.items() if key.removeprefix("security.") in given})
    for check in (lambda: check_security(config), lambda: check_worker_exposure("0.0.0.0", config)):
        with pytest.raises(SecurityError) as caught:
            check()
        named = {word for word in ("certificate", "key", "authority") if f"security.{word}" in str(caught.value)}
        assert named == {"certificate", "key", "authority"} - given


def test_each_role_has_its_own_certificate(certificates, capfd):
    config = configured(certificates)
    check_security(config, ("router", "target", "draft"))
    assert identity(config, "target").current() != identity(config, "router").current()
    assert identity(Config(), "target") is None
    assert capfd.readouterr().err == ""
    one = configured(certificates | {key: text.replace("{role}", "router") for key, text in certificates.items()})
    with pytest.raises(SecurityError, match=r"^security\.certificate .*; a draft needs one for draft\.paceline"):
        check_security(one, ("draft",))


def test_api_keys_are_read_at_the_start(tmp_path):
    assert api_keys(Config()) is None
    assert own_api_key(Config()) == ""
    path = tmp_path / "keys"
    config = configured({"security.api_keys": str(path)})
    for use in (check_security, api_keys, own_api_key):
        with pytest.raises(SecurityError, match=f"security.api_keys {path}: cannot be read"):
            use(config)
    path.write_text("me: 0123456789abcdef\n")
    check_security(config)
    assert own_api_key(config) == "0123456789abcdef"


def test_paths_are_meant_relative_to_the_file_that_names_them(tmp_path, monkeypatch):
    file = tmp_path / "paceline.yaml"
    file.write_text("security: {certificate: 'certs/{role}.crt', key: /k.pem, api_keys: keys}\n")
    security = load(file).security
    assert security.certificate == f"{tmp_path}/certs/{{role}}.crt"
    assert (security.key, security.authority, security.api_keys) == ("/k.pem", "", f"{tmp_path}/keys")
    monkeypatch.chdir(tmp_path)
    assert configured({"security.key": "k.pem"}).security.key == f"{tmp_path}/k.pem"


@pytest.fixture
def control_service():
    """Ray's control service, as far as it answers or refuses a call without a token: its address."""
    servers = []

    def started(refuses: bool) -> str:
        def check_alive(_request: bytes, context: grpc.ServicerContext) -> bytes:
            if refuses:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        method = grpc.unary_unary_rpc_method_handler(check_alive, bytes, bytes)
        server = grpc.server(futures.ThreadPoolExecutor(1))
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", {"CheckAlive": method}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield started
    for server in servers:
        server.stop(None).wait()


def test_a_ray_cluster_without_a_token_is_refused_on_a_network(control_service, capfd):
    address = control_service(False)
    assert answers_anyone(address)
    with pytest.raises(CommandError, match=r"asks for no token: .* RAY_AUTH_MODE=token, or add --allow-remote"):
        check_token(Config(), address, ["127.0.0.1", "192.0.2.1"])
    assert capfd.readouterr().err == ""
    check_token(Config(), address, ["127.0.0.1", "127.0.0.2"])
    check_token(configured(ALLOWED), address, ["192.0.2.1"])
    assert capfd.readouterr().err.count("asks for no token") == 2


def test_no_proxy_of_the_environment_hides_that_a_ray_cluster_is_open(control_service, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert answers_anyone(control_service(False))


def test_a_ray_cluster_with_a_token_is_joined_without_a_word(control_service, capfd):
    address = control_service(True)
    assert not answers_anyone(address)
    check_token(Config(), address, ["192.0.2.1"])
    assert capfd.readouterr().err == ""
