"""What nobody means to type, but scripts and editors write: answered in one line, as every other mistake is."""

import pytest

from cluster.cli import main
from cluster.config.config import load
from cluster.config.settings import ConfigError
from tests.ports import free_port
from transport.address import AddressError, check_free, parse

NO_HOME, ENDLESS, NO_PORT = "~nobody-of-this-name/x", "a" * 5000, "127.0.0.1:\u00b2"
LISTEN = ["--listen", "127.0.0.1:0"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["complete", "x", "--url", "http://["], "--url http://[: "),
        (["complete", "x", "--url", "http://xn--/"], "--url http://xn--/: "),
        (["complete", "x", "--url", "http://a\x01"], "Invalid non-printable ASCII character"),
        (["top", "--once", "--url", "http://["], "--url http://[: "),
        (["top", "--once", "--url", "http://xn--/"], "--url http://xn--/: "),
        (["up", "--target", NO_HOME], f"--target {NO_HOME}: no such folder; give a model folder or a hub id"),
        (["up", "--target", ENDLESS], "cannot be read: File name too long"),
        (["up", "--draft", NO_HOME], f"--draft {NO_HOME}: no such folder"),
        (["up", "--draft-eagle", NO_HOME], f"target.eagle {NO_HOME}: not a folder of an EAGLE-3 head"),
        (["up", "--draft-eagle", ENDLESS], "not a folder of an EAGLE-3 head"),
        (["worker", "target", *LISTEN, "--draft-eagle", NO_HOME], f"--draft-eagle {NO_HOME}: not a folder of an EAGLE"),
        (["up", "--api-keys", NO_HOME], "cannot be read: No such file or directory"),
        (["up", "--api-keys", ENDLESS], "cannot be read: File name too long"),
        (["up", "--host", "\u00e9" * 70], "cannot be a host's name"),
        (["worker", "target", *LISTEN, "--model", NO_HOME], f"--model {NO_HOME}: no such folder"),
        (["worker", "draft", *LISTEN, "--target-tokenizer", NO_HOME], f"{NO_HOME}: no such folder"),
        (["worker", "draft", *LISTEN, "--target-tokenizer", ENDLESS], "File name too long"),
        (["worker", "draft", *LISTEN, "--assistant", NO_HOME], f"{NO_HOME}: no such folder"),
        (["worker", "target", "--listen", NO_PORT], "is not HOST:PORT"),
        (["router", "--target", NO_PORT], "is not HOST:PORT"),
        (["doctor", "--target", NO_PORT], "is not HOST:PORT"),
    ],
)
def test_odd_input_is_answered_in_one_line(arguments, words, capsys):
    if arguments[0] in ("up", "router"):
        arguments = [*arguments, "--port", str(free_port())]
        arguments += ["--allow-remote"] if "--host" in arguments else []
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


@pytest.mark.parametrize("command", [["router"], ["worker", "target"], ["worker", "draft"]])
def test_one_process_has_no_flags_for_how_many_there_are(command, capsys):
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    said = capsys.readouterr().out
    assert "--config" in said and "replicas" not in said


@pytest.mark.parametrize("command", ["down", "doctor"])
def test_no_command_promises_a_ray_that_it_does_not_start(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert "--address" in said and "start Ray" not in said
    assert ("(default: local)" in " ".join(said.split())) == (command == "doctor")


@pytest.mark.parametrize("port", ["\u00b2", "\u0661", "+1", " 1", "65536", "9" * 5000, ""])
def test_a_port_is_made_of_plain_digits(port):
    with pytest.raises(AddressError, match="is not HOST:PORT"):
        parse(f"127.0.0.1:{port}")


def test_a_name_that_no_host_has_is_not_listened_on():
    with pytest.raises(AddressError, match="cannot be a host's name"):
        check_free("\u00e9" * 70 + ":7001")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("start_timeout: 2026-02-30", "is not YAML: day is out of range for month"),
        ("start_timeout: !!int x", "is not YAML: invalid literal for int()"),
        ("start_timeout: !!bool x", "is not YAML: 'x'"),
        ("start_timeout: !!timestamp x", "is not YAML: "),
        (f"start_timeout: {'9' * 5000}", "is not YAML: Exceeds the limit"),
        ("target: " + "[" * 20000, "is not YAML that can be read: it is nested too deep"),
        ("target: " + "{a: " * 5000, "is not YAML that can be read: it is nested too deep"),
        ("backend: \udcff", "is not YAML: 'utf-8' codec can't decode"),
    ],
)
def test_yaml_that_cannot_be_is_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "paceline.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path} {words}")
    assert "\n" not in str(caught.value)
