"""The numbers of docs/structure.md hold, and what counts them can count."""

import ast

import pytest

from tests.structure import PAGE, Product, complexity, kept, measure, page, strongly_connected


def engine(root):
    room = root / "engine"
    room.mkdir()
    (room / "__init__.py").touch()
    return room


def test_nothing_is_worse_than_it_was():
    limits = kept(PAGE.read_text())
    rows = measure()
    assert [row.what for row in rows] == list(limits)
    worse = {row.what: (row.number, row.examples) for row in rows if not row.free and row.number > limits[row.what]}
    assert not worse, "see `make structure`; where it has to be: `make structure ARGS=--write`"


def test_the_page_keeps_what_was_measured():
    rows = measure()
    assert kept(page(rows)) == {row.what: row.number for row in rows}


def test_rings_are_found_wherever_the_imports_stand(tmp_path):
    room = engine(tmp_path)
    (room / "a.py").write_text("from engine import b\n")
    (room / "b.py").write_text("def late():\n    from engine.c import name\n")
    (room / "c.py").write_text("if TYPE_CHECKING:\n    from .a import other\n")
    (room / "d.py").write_text("import engine.a\n")
    assert Product(tmp_path).rings() == ["engine.a - engine.b - engine.c"]


def test_nodes_that_reach_each_other():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set()}
    assert sorted(map(sorted, strongly_connected(graph))) == [["a", "b", "c"], ["d"], ["e"]]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("return 1", 1),
        ("if a and b or c: pass", 4),
        ("return [x for x in y if x if x > 1]", 4),
        ("assert a", 1),
        ("try: pass\nexcept E: pass", 2),
        ("match a:\n case 1: pass\n case 2: pass", 3),
    ],
)
def test_complexity_counts_decisions(source, expected):
    assert complexity(ast.parse(source)) == expected


def test_reading_the_environment_is_told_from_setting_it(tmp_path):
    room = engine(tmp_path)
    lines = [
        "import os",
        "os.environ['A'] = '1'",
        "os.environ.setdefault('A', '1')",
        "os.environ['A']",
        "os.getenv('A')",
    ]
    (room / "a.py").write_text("\n".join([*lines, "{**os.environ}"]))
    assert Product(tmp_path).environment_reads() == ["engine/a.py:4", "engine/a.py:5", "engine/a.py:6"]


def test_net_lines_are_code(tmp_path):
    room = engine(tmp_path)
    text = '"""What it\ndecides."""\n\n# why\ndef f():\n    """Says."""\n    return """a\n\nb"""\n'
    (room / "a.py").write_text(text)
    assert [module.net_lines for module in Product(tmp_path).modules] == [0, 3]
