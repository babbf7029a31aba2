"""API keys: what a file may say, and that a change of it counts without a restart."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from router.http.auth import FILE_BYTES, LOOK_SECONDS, MAX_KEYS, ApiKeys, KeyFileError, read_keys

ALICE, BOB, CAROL = "alice-0123456789abcdef", "bob-0123456789abcdef", "carol-0123456789abcdef"


def name_of(keys: ApiKeys, key: str) -> str | None:
    holder = keys.holder_of(key)
    return None if holder is None else holder.name


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_keys_have_names_or_lines(path):
    path.write_text(f"# who may ask\n\nalice: {ALICE}\n{BOB}\n  carol@example.org:{CAROL}  \r\n")
    names = {key: holder.name for key, holder in read_keys(path).items()}
    assert names == {ALICE: "alice", BOB: "line 4", CAROL: "carol@example.org"}
    keys = ApiKeys(path)
    assert [name_of(keys, key) for key in (ALICE, BOB, CAROL)] == ["alice", "line 4", "carol@example.org"]
    for stranger in ("", ALICE[:-1], ALICE + "x", ALICE.upper(), "ä" * 20, "alice"):
        assert name_of(keys, stranger) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no keys; write one on each line"),
        ("# nothing\n\n", "has no keys"),
        (f"{ALICE}\ntwo words here and there\n", "line 2 is neither KEY nor NAME: KEY"),
        (f"{ALICE},{BOB}", "line 1 is neither KEY nor NAME: KEY"),
        ("secret: short-secret", "the key in line 1 is shorter than 16 characters"),
        (f"a: {ALICE}\nb: {ALICE}", "line 2 has the same key as line 1"),
        ("ä" * 20, "is not ASCII text"),
        ("\n".join(f"{n:016}" for n in range(MAX_KEYS + 1)), f"has {MAX_KEYS + 1} keys, more than {MAX_KEYS}"),
        ("#" * (FILE_BYTES + 1), f"is larger than {FILE_BYTES} bytes"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_its_keys(path, content, words):
    path.write_text(content)
    with pytest.raises(KeyFileError) as caught:
        ApiKeys(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {words}")
    assert not any(secret in message for secret in (ALICE, "short-secret", "two words"))


def test_a_holder_is_an_operator_in_every_line(path):
    path.write_text(f"ops: {ALICE} operator=1\nops: {BOB}\n")
    with pytest.raises(KeyFileError, match="line 2 gives ops other limits than line 1"):
        ApiKeys(path)
    path.write_text(f"ops: {ALICE} operator=1\n{BOB}\nops: {CAROL} operator=1\n")
    keys = ApiKeys(path)
    holders = [keys.holder_of(key) for key in (ALICE, BOB, CAROL)]
    assert [holder and (holder.operator, keys.may_operate(holder)) for holder in holders] == [
        (True, True),
        (False, False),
        (True, True),
    ]
    assert not any(holder.limits for holder in holders if holder)


def test_a_file_that_is_not_there_is_refused(path):
    with pytest.raises(KeyFileError, match="cannot be read: No such file or directory"):
        ApiKeys(path)


def test_a_change_counts_as_soon_as_the_file_is_looked_at_again(path):
    path.write_text(f"a: {ALICE}\nb: {BOB}\n")
    clock = Clock()
    keys = ApiKeys(path, clock)
    path.write_text(f"a: {ALICE}\nc: {CAROL}\n# and more\n")
    clock.now = LOOK_SECONDS / 2
    assert (name_of(keys, BOB), name_of(keys, CAROL)) == ("b", None)
    clock.now = LOOK_SECONDS
    assert (name_of(keys, BOB), name_of(keys, CAROL), name_of(keys, ALICE)) == (None, "c", "a")


def test_a_file_that_is_replaced_with_one_alike_is_noticed(path, tmp_path):
    path.write_text(ALICE)
    clock = Clock()
    keys = ApiKeys(path, clock)
    new, times = tmp_path / "new", path.stat()
    new.write_text(ALICE[::-1])
    os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
    new.rename(path)
    clock.now = LOOK_SECONDS
    assert name_of(keys, ALICE[::-1]) == "line 1"
    assert name_of(keys, ALICE) is None


def test_a_revoked_key_is_refused_also_if_the_file_could_not_be_read_at_first(path, monkeypatch, caplog):
    """As where a router has no file descriptors left for a while."""
    path.write_text(ALICE)
    clock = Clock()
    keys = ApiKeys(path, clock)
    path.write_text(f"{BOB}\n# instead\n")

    def exhausted(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", exhausted)
        for _ in range(3):
            clock.now += LOOK_SECONDS
            assert name_of(keys, ALICE) == "line 1"
    assert len(caplog.messages) == 1
    clock.now += LOOK_SECONDS
    assert (name_of(keys, ALICE), name_of(keys, BOB)) == (None, "line 1")


@pytest.mark.parametrize("spoil", [lambda path: path.write_text("# none\n"), lambda path: path.unlink()])
def test_a_change_that_cannot_be_used_is_told_once_and_the_earlier_keys_stay(path, spoil, caplog):
    caplog.set_level(logging.INFO)
    path.write_text(ALICE)
    clock = Clock()
    keys = ApiKeys(path, clock)
    spoil(path)
    for _ in range(3):
        clock.now += LOOK_SECONDS
        assert name_of(keys, ALICE) == "line 1"
    (line,) = caplog.messages
    assert line.endswith("; the earlier keys stay valid")
    path.write_text(f"{BOB}\n# again\n")
    clock.now += LOOK_SECONDS
    assert name_of(keys, ALICE) is None
    assert name_of(keys, BOB) == "line 1"
    assert ALICE not in caplog.text
    assert BOB not in caplog.text
