"""Which C++ library a worker loads: none that another user of the machine could have put there."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.cpu import library as built

LEVEL = "x86-64-v3"


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library in the folder for temporary files, put there by a worker whose group may write by default."""

    def run(command: list[str], **_: object) -> Done:
        Path(command[command.index("-o") + 1]).write_bytes(b"x")
        return Done()

    monkeypatch.setattr(built, "COMPILERS", ("true",))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(built.subprocess, "Popen", run)
    source = tmp_path / "package" / "kernels.cpp"
    source.parent.mkdir()
    source.write_text("// nothing")
    monkeypatch.setattr(built, "SOURCE", source)
    monkeypatch.setattr(built.tempfile, "gettempdir", lambda: str(tmp_path))
    (source.parent / "built").write_text("not a folder")
    before = os.umask(0o002)
    try:
        path = built.build(LEVEL)
    finally:
        os.umask(before)
    assert path.parent == tmp_path / f"paceline-{os.getuid()}" and built._ours(path)
    (source.parent / "built").unlink()
    return path


class Done:
    """A compiler that is."""

    returncode = 0

    def __enter__(self) -> Done:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def communicate(self, timeout: float) -> tuple[str, str]:
        return "", ""


def folder_by_link(path: Path) -> None:
    """Of root, as /dev/shm is: whoever may write there wrote the library."""
    moved = path.parent.rename(path.parent.with_name("anywhere"))
    path.parent.symlink_to(moved)


def file_by_link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("anywhere")))


def file_of_another(path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give files away")
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    ("spoil", "elsewhere"),
    [
        (folder_by_link, True),
        (lambda path: path.parent.chmod(0o1777), True),
        (lambda path: path.parent.chmod(0o775), True),
        (file_by_link, False),
        (file_of_another, False),
        (lambda path: path.chmod(0o775), False),
        (lambda path: path.chmod(0o757), False),
        (lambda path: path.write_bytes(b""), False),
    ],
    ids=["folder by link", "folder of all", "folder of a group", "link", "of another", "of a group", "of all", "empty"],
)
def test_what_others_could_have_put_there_is_not_loaded(
    spoil: Callable[[Path], object], elsewhere: bool, found: Path
) -> None:
    """Nor is another put there, where they could change it."""
    spoil(found)
    assert not built._ours(found)
    assert built._writable(found.parent) is not elsewhere
    path = built.build(LEVEL)
    assert built._ours(path) and (path.parent == built.SOURCE.parent / "built")


@pytest.mark.parametrize("link", [False, True])
def test_beside_the_source_its_group_may_write_and_links_are_followed(link: bool, found: Path, tmp_path: Path) -> None:
    """Who may do either may change the source too."""
    found.unlink()
    folder = built.SOURCE.parent / "built"
    if link:
        (tmp_path / "store").mkdir()
        folder.symlink_to(tmp_path / "store")
    path = built.build(LEVEL)
    assert path.parent == folder
    for group, everybody in ((0o775, 0o777), (0o775, 0o757)):
        for each in (path, folder):
            each.chmod(group)
            assert built._ours(path) and built._writable(folder)
            each.chmod(everybody)
            assert not built._ours(path)
            each.chmod(0o755)
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
