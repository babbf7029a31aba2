"""Files that `-k` leaves unread have no test that it asks for."""

from __future__ import annotations

import pytest

from tests.words import ROOT, in_one_process, may_match

TRIE, HTTP = ROOT / "tests/unit/speculation/test_trie.py", ROOT / "tests/integration/test_schemathesis.py"


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "test_trie",
        "TRIE",
        "unit and test_trie",
        "no_such_thing or trie",
        "not http",
        "no_such_thing and not http",
        "a\\xe4",
        "(",
        "trie0-17",
    ],
)
def test_a_file_is_read_that_may_have_what_is_asked_for(expression: str) -> None:
    assert may_match(expression, TRIE)


@pytest.mark.parametrize("expression", ["no_such_" + "thing", "test_trie and no_such_" + "thing", "integration/"])
def test_a_file_is_left_unread_that_does_not_say_it(expression: str) -> None:
    assert not may_match(expression, TRIE)


def test_what_is_said_by_modules_that_are_imported_counts() -> None:
    """The paths of the API are parameters there, and written in the module that describes them."""
    assert "cluster" not in HTTP.read_text()
    assert may_match("get-/cluster", HTTP)


@pytest.mark.parametrize(
    ("expression", "arguments", "expected"),
    [
        ("", ["tests"], False),
        ("", ["tests/unit"], False),
        ("trie", ["tests"], True),
        ("", ["tests/unit/speculation/test_trie.py"], True),
        ("", ["tests/unit/speculation/test_trie.py::test_one", "tests/unit/router/text/test_text.py"], True),
        ("", ["tests/unit/speculation/test_trie.py", "tests/sim"], False),
    ],
)
def test_few_tests_share_a_process(expression: str, arguments: list[str], expected: bool) -> None:
    assert in_one_process(expression, arguments) is expected
