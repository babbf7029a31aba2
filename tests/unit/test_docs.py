"""The documentation against what it speaks of: links, commands, lengths, the protocol, the status of decisions."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.chaos.scenarios import scenarios
from benchmarks.chaos.settings import ChaosOptions
from cluster.cli import COMMANDS, DESCRIPTION, _parsers, from_outside
from cluster.commands import router
from cluster.config.environment import CHECKOUT
from protos.paceline.v1 import worker_pb2
from tests.deploy.test_planted_faults import FAULTS
from tests.protocol_page import page_section

DOCS = CHECKOUT / "docs"
PLANTED = "test_planted_fault_is_refused_for_its_own_reason"
"""One test of many faults: a page says which."""
PAGES = [
    CHECKOUT / "README.md",
    CHECKOUT / "CONTRIBUTING.md",
    CHECKOUT / "deploy" / "README.md",
    *sorted(DOCS.rglob("*.md")),
]
DECISIONS = sorted((DOCS / "adr").glob("0*.md"))
MAX_LINE = 120
MAX_README_LINES = 120
GUIDES = [DOCS / f"{name}.md" for name in ("drafting", "quickstart", "size", "speculation", "troubleshooting")]
"""Pages whose flags are all of Paceline's own commands."""
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(page: Path) -> list[tuple[int, str]]:
    """Its lines outside of blocks and tables, with their numbers."""
    lines, within = [], False
    for number, line in enumerate(text_of(page).splitlines(), 1):
        within ^= line.lstrip().startswith("```")
        if not within and not line.startswith("|"):
            lines.append((number, line))
    return lines


def anchors(page: Path) -> set[str]:
    """What GitHub makes of its headings."""
    titles = [line.lstrip("#").strip() for _, line in prose_of(page) if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(page: Path) -> list[str]:
    """Every Paceline command in its blocks, with continuation lines joined and without comment."""
    found = []
    for language, block in BLOCK.findall(text_of(page)):
        for line in block.replace("\\\n", " ").splitlines() if language != "python" else ():
            if match := re.match(r"^\s*(?:\$ )?(?:\.venv/bin/)?paceline (\w.*)", line):
                found.append(match[1])
    return found


@pytest.mark.parametrize("name", ["faults.md", "security.md"])
def test_every_row_about_threats_and_faults_names_tests_that_are_there(name):
    page = text_of(DOCS / name)
    heads = ("| door |", "| it tries", "| what goes wrong |")
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(heads)]
    assert len(rows) > 20
    played = {row.name for row in scenarios(ChaosOptions())}
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^`]+)\])?`", row)
        assert named, row
        assert played.issuperset(re.findall(r"row `([\w-]+)`", row)), row
        for path, test, case in named:
            assert test != PLANTED or case in {fault.what for fault in FAULTS}, f"there is no fault {case!r}: {row}"
            assert re.search(rf"^(async )?def {test}\(", text_of(CHECKOUT / path), re.MULTILINE), (
                f"{path} has no {test}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text_of(page))):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        aim = (page.parent / name).resolve() if name else page
        assert aim.exists(), link
        assert aim.is_relative_to(CHECKOUT), f"{link} leaves the repository"
        if anchor:
            assert anchor in anchors(aim), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_lines_of_prose_are_short(page):
    assert [number for number, line in prose_of(page) if len(line) > MAX_LINE] == []


def test_the_readme_is_short_and_begins_with_what_it_is():
    lines = text_of(CHECKOUT / "README.md").splitlines()
    assert len(lines) < MAX_README_LINES
    screen = "\n".join(lines[:35])
    for wanted in ("docs/images/page.png", "make run", "make test", "paceline up --target", "AMD EPYC"):
        assert wanted in screen


def test_make_has_what_is_documented():
    targets = set(re.findall(r"^(\w+):", text_of(CHECKOUT / "Makefile"), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`make (\w+)", text_of(page))}
    named |= set(re.findall(r"^make (\w+)", text_of(CHECKOUT / "README.md"), re.MULTILINE))
    assert named >= {"run", "test", "check", "sim", "chaos"}
    assert named <= targets


@pytest.mark.parametrize(("page", "line"), [(page, line) for page in PAGES for line in commands(page)])
def test_a_command_is_one_that_our_parser_takes(page, line):
    arguments = [word for word in shlex.split(line, comments=True) if word != "..."]
    known = COMMANDS | from_outside()
    assert arguments[0] in known
    _parsers(known)[0].parse_args(arguments)


def flags_of(parser: argparse.ArgumentParser, command: str = "") -> dict[str, set[str]]:
    """The flags of each command, by its words."""
    found = {command: {flag for action in parser._actions for flag in action.option_strings}}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                found |= flags_of(inner, f"{command} {word}".strip())
    return found


FLAGS = flags_of(_parsers(COMMANDS | from_outside())[0])


def flags_named(text: str) -> set[str]:
    """All flags of the commands that a text names, and of those that these consist of."""
    named = [name for name in FLAGS if name and re.search(rf"paceline {name}\b(?! [a-z])", text)]
    return {flag for command, flags in FLAGS.items() for flag in flags if command.startswith(tuple(named))}


@pytest.mark.parametrize("text", [DESCRIPTION, router.DETAILS, *(text_of(page) for page in PAGES)])
def test_a_router_by_hand_is_told_the_tokenizer_of_the_model_that_a_worker_by_hand_is(text):
    """Or it has that of the bundled one, which fits no other."""
    for block in re.split(r"\n\n|```", text):
        if re.search(r"paceline worker target .*--model", block) or text == router.DETAILS:
            for command in re.findall(r"paceline router --target .*", block):
                assert "--tokenizer" in command or "--config" in command


def test_commands_that_a_text_names_have_their_own_flags():
    assert flags_named("no command") == set()
    assert "--eagle-format" not in flags_named("`paceline up` starts both so")
    assert flags_named("`--cache-tokens N` of `paceline worker`") >= {"--cache-tokens", "--eagle-format"}


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_flag_is_one_of_up_or_of_a_command_that_the_paragraph_or_else_the_section_names(page):
    for section in re.split(r"^(?=#+ )", text_of(page), flags=re.MULTILINE):
        for paragraph in re.split(r"\n\n|\n(?=- )", BLOCK.sub("", section)):
            known = FLAGS["up"] | (flags_named(paragraph) or flags_named(section))
            for code in re.findall(r"`(--[a-z][^`]*)`", paragraph):
                assert set(re.findall(r"--[a-z][\w-]*", code)) <= known, f"{code}: {paragraph}"


def test_the_index_lists_every_page():
    index = text_of(DOCS / "README.md")
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name


def test_examples_in_python_are_python():
    examples = [block for language, block in BLOCK.findall(text_of(DOCS / "quickstart.md")) if language == "python"]
    assert len(examples) == 3
    for example in examples:
        ast.parse(example)


def test_the_protocol_page_has_every_message():
    page = text_of(DOCS / "protocol.md")
    kinds = {
        field.message_type.name
        for wrapper in (worker_pb2.ToWorker, worker_pb2.FromWorker)
        for field in wrapper.DESCRIPTOR.oneofs_by_name["kind"].fields
    }
    rows = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert rows == kinds
    shown = set(re.findall(r"->>\w: (\w+)", page))
    assert shown <= kinds


def test_the_protocol_page_has_the_states_as_the_table_has_them():
    shown = text_of(DOCS / "protocol.md").split("## The states of a session\n")[1].split("\n## ")[0]
    _, found = shown.split("do not edit. -->\n\n")
    assert found.strip() == page_section()


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_a_number_a_status_and_a_date(page):
    title, blank, status, *rest = text_of(page).splitlines()
    assert title.startswith(f"# {page.name[:4]} ") and not blank and not rest[0]
    state, day = r"(?:Accepted|Superseded by \[\d{4}\]\(\d{4}-[\w-]+\.md\))", r"\d{4}-\d\d-\d\d"
    found = re.fullmatch(rf"{state}, ({day})(?:; last revised {day})?\.", status)
    assert found, status
    row = rf"^\| \[{page.name[:4]}\]\({re.escape(page.name)}\) \| .* \| {found[1]} \|$"
    assert re.search(row, text_of(DOCS / "adr" / "README.md"), re.MULTILINE)
    assert "original design" not in text_of(page), "a decision says itself what it departs from"
