"""Data for alignment: every passage once, in bounded memory, what is held out apart, bad files in one line."""

from __future__ import annotations

import io
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from alignment import data
from alignment.data import BLOCK_BYTES, Conversation, DataSource, Passage, find_data, scattered
from alignment.options import DataError

ALPHABET = "abcdefgh  \n\nöé世🎉"


def all_of(*paths: Path, seed: int = 0) -> list[Passage]:
    found = find_data(paths)
    return [passage for held_out in (True, False) for passage in found.passages(seed, held_out=held_out)]


@pytest.mark.parametrize("seed", range(20))
def test_the_blocks_of_a_text_are_the_text(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    alphabet = ALPHABET.replace("\n", "") if seed % 3 == 0 else ALPHABET  # with no line breaks at all
    text = "x" + "".join(draw.choices(alphabet, k=draw.randrange(1, 12000)))
    if seed % 3 == 1:  # with lines longer than blocks
        text += "ö" * draw.randrange(2 * BLOCK_BYTES) + "\n" + text
    path = tmp_path / "text.txt"
    path.write_text(text, "utf-8")
    source = DataSource(path, path.stat().st_size)
    blocks = [passage.rest for block in range(source.blocks) for passage in source.read(block)]
    assert "".join(blocks) == text, f"seed {seed}"
    assert max(len(block.encode()) for block in blocks) <= BLOCK_BYTES + data.SLACK_BYTES + 3


@pytest.mark.parametrize("seed", range(10))
def test_every_record_is_read_once(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    texts = [f"{number} " + "é" * draw.choice((0, 10, 1000, 3 * BLOCK_BYTES)) for number in range(40)]
    lines = [json.dumps({"text": text}, ensure_ascii=draw.random() < 0.5) for text in texts]
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(lines) + draw.choice(("", "\n", "\n\n\n")), "utf-8")
    assert sorted(passage.rest for passage in all_of(path, seed=seed)) == sorted(texts), f"seed {seed}"


def test_forms_of_records(tmp_path: Path) -> None:
    user, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
    tool = {"type": "function", "function": {"name": "f"}}
    records: list[tuple[dict[str, Any], Passage]] = [
        ({"text": "a"}, Passage("", "a")),
        ({"prompt": "a"}, Passage("a", "")),
        ({"prompt": "a", "completion": "b", "model": "m"}, Passage("a", "b")),
        ({"prompt": "", "completion": "b"}, Passage("", "b")),
        ({"messages": [user]}, Passage(Conversation((user,)), "")),
        ({"messages": [user, said]}, Passage(Conversation((user,)), "hello")),
        ({"messages": [user, said], "completion": "b"}, Passage(Conversation((user, said)), "b")),
        ({"messages": [user], "tools": [tool]}, Passage(Conversation((user,), (tool,)), "")),
    ]
    for number, (record, passage) in enumerate(records):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(record))
        assert all_of(path) == [passage]


@pytest.mark.parametrize("empty", ['{"model": "m", "prompt": ""}', '{"text": ""}'])
def test_a_record_without_text_is_left_out(tmp_path: Path, empty: str) -> None:
    path = tmp_path / "prompts-1.jsonl"
    path.write_text(empty + '\n{"model": "m", "prompt": "a"}\n')
    assert all_of(path) == [Passage("a", "")]


def test_the_order_depends_on_the_seed_alone_and_is_scattered(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {number:06}\n" for number in range(20_000)))
    orders = [[passage.rest[:8] for passage in all_of(tmp_path, seed=seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    assert {first[0] for first in orders[0][:6]} == {"a", "b"}, "a short run sees all files"


@pytest.mark.parametrize("seed", range(5))
def test_scattered_numbers_are_all_numbers(seed: int) -> None:
    for count in (0, 1, 2, 3, 4, 5, 6, 7, 8, 30, 97, 360):
        assert sorted(scattered(count, seed)) == list(range(count)), f"seed {seed}, count {count}"


def test_what_is_held_out_is_so_everywhere(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"question {number % 300}", "completion": str(number)}) for number in range(900)]
    (tmp_path / "one.jsonl").write_text("\n".join(lines))
    (tmp_path / "two.jsonl").write_text("\n".join(reversed(lines)))
    found = find_data([tmp_path])
    train, apart = ({passage.start for passage in found.passages(7, held_out=side)} for side in (False, True))
    assert not train & apart
    assert len(train | apart) == 300
    assert 10 < len(apart) < 60
    (tmp_path / "one.jsonl").unlink()
    assert apart == {passage.start for passage in find_data([tmp_path]).passages(8, held_out=True)}


class Endless(io.RawIOBase):
    """Text that is made as it is read."""

    read_bytes = 0

    def __init__(self, size: int) -> None:
        self._at, self._size = 0, size

    def seek(self, offset: int, _whence: int = 0) -> int:
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._size - self._at)
        line = b"%015d\n"
        first = self._at // 16
        made = b"".join(line % number for number in range(first, first + count // 16 + 2))
        buffer[:count] = made[self._at % 16 :][:count]
        self._at += count
        Endless.read_bytes += count
        return count


class HugeFile:
    suffix = ".txt"
    size = 10 * 10**9

    def open(self, _mode: str) -> Endless:
        return Endless(self.size)


def test_ten_gigabytes_take_no_more_memory_than_a_block() -> None:
    huge: Any = HugeFile()
    passages = data.Data([DataSource(huge, HugeFile.size)]).passages(3, held_out=False)
    next(passages)
    Endless.read_bytes = 0
    tracemalloc.start()
    starts = [int(next(passages).rest[:15]) for _ in range(200)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 500_000
    assert Endless.read_bytes < 200 * 2 * (BLOCK_BYTES + data.SLACK_BYTES + 8)
    spread = HugeFile.size / 16
    assert min(starts) < 0.1 * spread and max(starts) > 0.9 * spread


BAD = {
    "empty.txt": (b"", "is empty"),
    "blank.txt": (b"\n \n", "is empty"),
    "binary.txt": (b"ab\0cd", "is binary"),
    "latin.txt": ("Zoë".encode("latin-1"), "is binary"),
    "utf16.txt": ("hello".encode("utf-16"), "is binary"),
    "late.txt": (b"x\n" * 9000 + b"\xff\xfe" + b"y\n" * 9000, "byte 18000 is not UTF-8 text"),
    "nul.txt": (b"x\n" * 9000 + b"\0" + b"y\n" * 9000, "byte 18000 is NUL"),
    "broken.jsonl": (b'{"text": "a"}\n{"text": ', "the line at byte 14 is not JSON"),
    "fields.jsonl": (
        b'{"body": "a"}',
        'the line at byte 0 has none of "text", "prompt" (and "completion") or "messages"',
    ),
    "number.jsonl": (b'{"text": 5}', "has none of"),
    "roles.jsonl": (b'{"messages": [{"content": "a"}]}', "has none of"),
    "array.jsonl": (b'["a"]', "has none of"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    content, reason = BAD[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as told:
        all_of(path)
    assert str(path) in str(told.value)
    assert reason in str(told.value)
    assert "\n" not in str(told.value)


def test_a_line_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_RECORD_BYTES", 1 << 20)
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "x" * (2 << 20)}))
    with pytest.raises(DataError, match=r"the line at byte 0 is longer than 1 MB"):
        all_of(path)


def test_missing_paths_and_folders_without_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        find_data([tmp_path / "nowhere"])
    for name in ("~nobody-of-this-name/x", "a" * 5000):
        with pytest.raises(DataError, match="no such file or folder"):
            find_data([Path(name)])
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / ".hidden.txt").write_text("text")
    with pytest.raises(DataError, match="holds no text file"):
        find_data([tmp_path])
    (tmp_path / "text.txt").write_text("text\n")
    assert [passage.rest for passage in all_of(tmp_path)] == ["text\n"]
