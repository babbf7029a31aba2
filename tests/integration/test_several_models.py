"""The commands that ask for a text, at a server of two models, which has to be told of which."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

import httpx
import pytest

from cluster.cli import main
from cluster.commands import up
from cluster.config.config import Config, from_mapping
from cluster.doctor import endpoint
from router.generation import ServedModel
from tests.fakes import FakeGenerator, commits, tiny_tokenizer
from tests.http_server import serve

NAMES = ("llama", "org/qwen")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    tokenizer = tiny_tokenizer()
    generator = FakeGenerator(lambda _: commits(tokenizer.encode("hello " * 200, special=False), [3] * 200))
    generator.models = {name: ServedModel(name, tokenizer.size, 1024, tokenizer.digest) for name in NAMES}
    with serve(generator, tokenizer) as address:
        yield address


@pytest.fixture
def config(url: str) -> Config:
    return from_mapping({"router": {"port": httpx.URL(url).port}, "models": dict.fromkeys(NAMES)}, "args")


def test_complete_asks_for_the_model_that_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["complete", "hi", "--url", url, "--max-tokens", "5", "--no-compare"]
    assert main([*arguments, "--model", "org/qwen"]) == 0
    assert capsys.readouterr().out.startswith("hello ")
    assert main(arguments) == 2
    assert "model is missing; it must be one of 'llama', 'org/qwen'" in capsys.readouterr().err


def test_the_doctor_asks_each_model(url: str) -> None:
    served, *asked = map(str, endpoint.check(url))
    assert served == f"ok       http {url}: serves llama, org/qwen"
    assert [line.partition(": ")[0] for line in asked] == [f"ok       http {url}, {name}" for name in NAMES]


def test_what_up_says_and_shows_is_answered(config: Config, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    up._demo(config)
    assert "failed" not in capsys.readouterr().err
    up._say_how_to_use(config, False)
    said = "".join(capsys.readouterr())
    complete, curl = (shlex.split(line) for line in said.splitlines() if line.startswith("  "))
    assert main(complete[1:]) == 0
    answer = httpx.post(curl[1], json=json.loads(curl[-1]), trust_env=False)
    assert (answer.status_code, answer.json()["model"]) == (200, "llama")
    assert curl[1] == f"{url}/v1/completions"
