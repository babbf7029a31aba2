"""The recorder writes, or leaves it; it never fails a step."""

import json
import logging
from pathlib import Path

import pytest

from engine.recorder import Recorder, RecordError


@pytest.fixture
def full_disk():
    device = Path("/dev/full")
    if not device.exists():
        pytest.skip("this system has no /dev/full")
    return device


def test_one_line_for_each_step(tmp_path):
    recorder = Recorder(tmp_path / "record.jsonl")
    recorder.write(role="target", tokens=3)
    recorder.write(role="target", tokens=4)
    recorder.flush()
    lines = (tmp_path / "record.jsonl").read_text().splitlines()
    assert [json.loads(line)["tokens"] for line in lines] == [3, 4]


def test_a_file_that_cannot_be_written_is_told_at_the_start(tmp_path):
    with pytest.raises(RecordError, match=r"cannot record to .*/no/file: No such file or directory; give a file that"):
        Recorder(tmp_path / "no" / "file")
    with pytest.raises(RecordError, match="Is a directory"):
        Recorder(tmp_path)


@pytest.mark.parametrize("size", [10, 10**6])
def test_a_full_disk_ends_the_record_with_one_warning(size, full_disk, caplog):
    recorder = Recorder(full_disk)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            recorder.write(text="x" * size)
            recorder.flush()
    assert [record.getMessage() for record in caplog.records] == [
        f"recording to {full_disk} has ended: No space left on device"
    ]
