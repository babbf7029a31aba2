"""Recorded prompts: only where wanted, never of who opts out, bounded on disk and in memory, readable as data."""

from __future__ import annotations

import json
import logging
import resource
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignment.data import Conversation, find_data
from alignment.encoding import Encoder, tokenizer_of
from cluster.config.config import load
from cluster.config.serving import router_settings
from cluster.config.settings import Override
from router.generation import ServedModel
from router.http import prompt_recorder
from router.http.api import build_app
from router.http.prompt_recorder import PATTERN, PromptRecorder, RecordedPrompt, RecordingError, RecordSettings
from router.schema.prompts import Prompt, chat_prompt
from router.schema.request_schema import ChatBody
from router.schema.structured import tools_of
from router.service import Router, RouterError, RouterSettings
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from tests.bundled import MODELS
from tests.fakes import BOS, FakeGenerator, FakeTokenizers, commits, tiny_tokenizer

PATHS = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "h"}]},
}
MEGABYTE = 1 << 20


@cache
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def asked(text: str) -> RecordedPrompt:
    body = json.dumps({"prompt": text}).encode()
    return RecordedPrompt("tiny", body, [Prompt(tokenizer().encode(text, special=True), text)], tokenizer())


def recorded(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob(PATTERN))
    return [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]


async def post(recorder: PromptRecorder | None, path: str, **fields: object) -> httpx.Response:
    model = ServedModel("tiny", tokenizer().size, 2048, tokenizer().digest)
    fake = FakeGenerator(lambda _: commits(tokenizer().encode("hello world", special=False), (2,)), model=model)
    app = build_app(fake, FakeTokenizers(tokenizer()), recorder=recorder)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://paceline") as client:
        return await client.post(path, json={"max_tokens": 2} | PATHS[path] | fields)


@pytest.mark.parametrize("path", PATHS)
async def test_only_a_router_that_records_does_and_a_request_may_opt_out(path: str, tmp_path: Path) -> None:
    assert (await post(None, path)).status_code == 200
    assert (await post(None, path, store=False)).status_code == 200
    refused = await post(None, path, store=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "store")
    recorder = PromptRecorder(RecordSettings(tmp_path / "kept", MEGABYTE))
    for fields in ({}, {"store": False}, {"store": True}, {"store": None}, {"max_tokens": -1}):
        await post(recorder, path, **fields)
    recorder.close()
    assert recorded(tmp_path / "kept") == 3 * [{"model": "tiny"} | PATHS[path]]


async def test_what_is_recorded_is_data(tmp_path: Path) -> None:
    recorder = PromptRecorder(RecordSettings(tmp_path, MEGABYTE))
    parts = [{"type": "text", "text": "wörld"}, {"type": "text", "text": "🎉"}]
    messages = [{"role": "developer", "content": "brief"}, {"role": "user", "content": parts, "name": None}]
    tokens = list(tokenizer().encode("the fox", special=False))
    await post(recorder, "/v1/chat/completions", messages=messages)
    await post(recorder, "/v1/completions", prompt=["one", "two"])
    await post(recorder, "/v1/completions", prompt=tokens)
    await post(recorder, "/v1/completions", prompt=[BOS])
    recorder.close()
    data = find_data([tmp_path])
    found = [passage.start for held_out in (True, False) for passage in data.passages(0, held_out=held_out)]
    told = ({"role": "system", "content": "brief"}, {"role": "user", "content": "wörld\n🎉"})
    assert Conversation(told) in found
    assert {start for start in found if isinstance(start, str)} == {"one", "two", "the fox"}


CALLS = """{{ tools | tojson }}{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": { {%- for name, value in c.function.arguments | items -%}
"{{ name }}": {{ value | tojson }}{% endfor %}}}
</tool_call>{% endfor %}{{ m.role }}: {{ m.content }}
{% endfor %}"""
"""A template that goes through the arguments of calls."""


async def test_a_recorded_chat_with_tools_is_encoded_as_it_was_served(tmp_path: Path) -> None:
    served = Tokenizer.load(str(MODELS / "target"))
    served.chat_template = ChatTemplate(CALLS, {})
    encoder = Encoder(tokenizer_of(str(MODELS / "target")))
    encoder.tokenizer.chat_template = CALLS
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    bare = {"id": "d", "type": "function", "function": {"name": "now", "arguments": ""}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, bare]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    weather = {"name": "weather", "description": None, "parameters": {"type": "object"}}
    body = {"messages": messages, "tools": [{"type": "function", "function": weather}]}
    chat = ChatBody.read({"model": "m"} | body)
    asked = chat_prompt(chat, served, ServedModel("m", served.size, 1 << 20, 0), tools_of(chat, served))
    lines = RecordedPrompt("m", json.dumps(body).encode(), [asked], served).lines()
    (tmp_path / "prompts-1.jsonl").write_bytes(b"".join(lines))
    (passage,) = (one for held_out in (True, False) for one in find_data([tmp_path]).passages(0, held_out=held_out))
    assert encoder.piece(passage).ids == asked.tokens


def test_files_are_for_their_owner_and_have_a_bound_together(tmp_path: Path) -> None:
    settings = RecordSettings(tmp_path / "a" / "b", 4000)
    recorder = PromptRecorder(settings)
    for number in range(300):
        recorder.take(asked(f"{number:03} " + "x" * (number % 150)))
    recorder.close()
    files = sorted(settings.folder.glob(PATTERN))
    assert recorder.recorded == 300 and recorder.dropped == 0
    assert len(files) > 2
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert settings.folder.stat().st_mode & 0o777 == 0o700
    assert max(file.stat().st_size for file in files) <= settings.file_bytes
    assert sum(file.stat().st_size for file in files) <= settings.total_bytes
    kept = [int(record["prompt"][:3]) for record in recorded(settings.folder)]
    assert kept == list(range(kept[0], 300)), "the oldest go"


def test_the_bound_also_holds_for_routers_that_write_little_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RecordSettings(tmp_path, 4000)
    for number in range(30):
        monkeypatch.setattr("os.getpid", lambda number=number: 1000 + number)
        recorder = PromptRecorder(settings)
        for _ in range(number % 3 * 3):
            recorder.take(asked("x" * 100))
        recorder.close()
        files = list(tmp_path.glob(PATTERN))
        assert sum(file.stat().st_size for file in files) <= settings.total_bytes
        assert all(file.stat().st_size for file in files), "none is left empty"
    assert len(files) > 2


def test_a_file_that_another_router_took_for_the_oldest_is_begun_anew(tmp_path: Path) -> None:
    quiet = PromptRecorder(RecordSettings(tmp_path, 4000))
    quiet.take(asked("first"))
    while not quiet.recorded:
        time.sleep(0.01)
    (taken,) = tmp_path.glob(PATTERN)
    taken.unlink()
    quiet.take(asked("later"))
    quiet.close()
    (file,) = tmp_path.glob(PATTERN)
    assert "later" in file.read_text()


def test_a_full_disk_ends_the_recording_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = PromptRecorder(RecordSettings(tmp_path, 400 * MEGABYTE))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with caplog.at_level(logging.WARNING, "router.http.prompt_recorder"):
            for _ in range(100):
                recorder.take(asked("y" * 150))
            recorder.close()
            recorder.take(asked("later"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [record.message for record in caplog.records] == [
        f"prompts are recorded no more: {tmp_path}: File too large"
    ]
    line = json.dumps({"model": "tiny", "prompt": "y" * 150}) + "\n"
    assert len(recorded(tmp_path)) == recorder.recorded == 2000 // len(line)


def test_what_a_slow_disk_does_not_take_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prompt_recorder, "MAX_QUEUED", 4)
    writing, go_on = threading.Event(), threading.Event()
    append = prompt_recorder._Files.append

    def slowly(files: Any, line: bytes) -> None:
        writing.set()
        assert go_on.wait(10)
        append(files, line)

    monkeypatch.setattr(prompt_recorder._Files, "append", slowly)
    recorder = PromptRecorder(RecordSettings(tmp_path, MEGABYTE))
    recorder.take(asked("0"))
    assert writing.wait(10)
    for number in range(1, 20):
        recorder.take(asked(str(number)))
    go_on.set()
    recorder.close()
    assert [record["prompt"] for record in recorded(tmp_path)] == ["0", "1", "2", "3", "4"]
    assert recorder.dropped == 15
    assert len(caplog.records) == 4, "told at 1, 2, 4 and 8"


def test_bodies_that_wait_have_a_bound_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_recorder, "MAX_QUEUED_BYTES", 10)
    recorder = PromptRecorder(RecordSettings(tmp_path, MEGABYTE))
    recorder.take(asked("longer than ten bytes"))
    recorder.close()
    assert (recorder.recorded, recorder.dropped) == (0, 1)


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError, match=r"prompts cannot be recorded in .*file: File exists"):
        PromptRecorder(RecordSettings(tmp_path / "file", MEGABYTE))


async def test_a_router_that_cannot_record_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    router = Router(RouterSettings(port=0, record=RecordSettings(tmp_path / "file", MEGABYTE)))
    with pytest.raises(RouterError, match="File exists; see --record-prompts"):
        await router.start()
    await router.stop()


def test_the_folder_is_a_setting_of_routers(tmp_path: Path) -> None:
    file = tmp_path / "paceline.yaml"
    file.write_text("router:\n  record_prompts: kept\n")
    settings = router_settings(load(file, [Override("router.record_megabytes", "3", "--record-megabytes")])).record
    assert settings == RecordSettings(tmp_path / "kept", 3 * MEGABYTE)
    assert router_settings(load()).record is None
