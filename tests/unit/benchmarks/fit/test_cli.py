"""``paceline fit``: mistakes are answered in one line before anything is started, and flags arrive."""

from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.fit import main as fit
from benchmarks.fit import serving
from benchmarks.fit.command import FitError, FitOptions, Way
from cluster.cli import main
from cluster.config import environment
from draft_service import tokenizer
from speculation.events import Role
from speculation.messages import Source
from tests.bundled import MODELS, with_other_vocabulary

EAGLE = str(MODELS / "eagle")


@pytest.fixture
def started(monkeypatch):
    """The options of fits that would have run."""
    options = []
    monkeypatch.setattr(fit, "main", lambda given: options.append(given) or 0)
    return options


@pytest.fixture
def other(tmp_path) -> str:
    return str(with_other_vocabulary(tmp_path / "other"))


def test_a_draft_with_another_tokenizer_is_like_any_other(other, started):
    assert main(["fit", "--draft", other]) == 0
    assert started[0].drafts == (other,)


def test_one_that_shares_too_little_is_refused_as_its_worker_would_before_anything_is_served(
    other, monkeypatch, capsys
):
    monkeypatch.setattr(tokenizer, "MIN_SHARED", 1.01)
    monkeypatch.setattr(fit, "watch", lambda *_: pytest.fail("a worker would have been started"))
    assert main(["fit", "--draft", other]) == 2
    said = capsys.readouterr().err
    assert "tokens with the target's tokenizer, 100.0%; at least 101% are needed to draft, choose a draft" in said
    assert said.count("paceline:") == 1


def test_what_fails_later_is_one_line_too(monkeypatch, capsys):
    def fails(_):
        raise FitError("--draft a: its context holds 9 tokens")

    monkeypatch.setattr(fit, "main", fails)
    assert main(["fit"]) == 2
    assert capsys.readouterr().err == "paceline: --draft a: its context holds 9 tokens\n"


def test_every_draft_is_tried_with_every_source_and_those_alone_too(started, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("One prompt\nAnother\n")
    drafts = ["--draft", "Org/a", "--draft", "Org/b"]
    assert main(["fit", *drafts, "--prompts", str(file), "--sessions", "8", "--round-trip", "20"]) == 0
    (options,) = started
    lookup = frozenset({Source.LOOKUP})
    drafted = [Way(draft, local) for draft in ("Org/a", "Org/b") for local in (frozenset(), lookup)]
    assert options.ways == [Way(None, lookup), *drafted]
    assert [prompt.kind for prompt in options.prompts] == ["mine", "mine"]
    assert (options.sessions, options.round_trips) == ((1, 8), (0.02,))


def test_a_head_is_compared_once_it_is_given(started):
    assert main(["fit", "--eagle", EAGLE]) == 0
    assert main(["fit", "--eagle", EAGLE, "--source", "eagle,suffix"]) == 0
    usual, asked = started
    assert (usual.eagle, usual.sources, asked.sources) == (EAGLE, ("none", "lookup", "eagle"), ("eagle", "suffix"))


def test_an_eagle_head_is_a_source_or_drafts_on_a_worker_of_its_own(started):
    assert main(["fit", "--eagle", EAGLE]) == 0
    assert main(["fit", "--eagle", EAGLE, "--eagle-at", "drafter"]) == 0
    here, away = started
    assert here.sources == ("none", "lookup", "eagle")
    assert [str(way) for way in away.ways] == ["lookup", "draft", "draft + lookup", "eagle", "eagle + lookup"]


def test_the_bundled_draft_belongs_to_the_bundled_target(started):
    assert main(["fit"]) == 0
    assert main(["fit", "--target", str(MODELS / "target"), "--source", "lookup"]) == 0
    ours, theirs = started
    assert ours.drafts == (str(MODELS / "draft"),)
    assert theirs.drafts == ()
    assert len(ours.prompts) == 48


@pytest.mark.parametrize(
    ("device", "gpus", "shared"), [("auto", False, False), ("auto", True, True), ("cpu", True, False)]
)
async def test_workers_have_a_share_of_a_gpu_only_where_they_may_find_one(device, gpus, shared, monkeypatch):
    """With a share, a worker whose device is left open takes the GPU, and does not start where there is none."""
    plans = []

    @asynccontextmanager
    async def start(plan):
        plans.append(plan)
        yield None

    monkeypatch.setattr(serving, "running", start)
    monkeypatch.setattr(environment, "may_have_gpus", lambda: gpus)
    options = FitOptions(target="t", device=device)
    for role in Role:
        async with serving.serving(options, role, "m", Path("r")):
            pass
    assert [any("gpus=" in flag for flag in plan.flags) for plan in plans] == [shared] * 2
