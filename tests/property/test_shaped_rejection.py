"""Under the rejection rule, what is committed has the target's law also where that law is shaped.

Both p and q are shaped, and depend on the drafts before them: a token drafted twice is penalised twice. As in
``test_rejection_torch.py``, two tokens are decoded in many sessions, and every pair is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.sampling.rejection import draw_sparse, verify_chains
from engine.sampling.sampling import Draw, filtered_log_probs, sample
from engine.shaping.shaping import Shaping, shaped
from speculation.messages import Limits, Open, Sampling, SessionId, Token
from tests.property.test_rejection_torch import LARGEST_DEVIATION, OTHER, POSITION, TARGET, TOKENS, deviation

SESSIONS = 15_000
PROMPT = (2, 4)
DRAFTER = TARGET + 0.5 * OTHER
CASES = {
    "frequency": Sampling(frequency_penalty=-1.0),
    "all": Sampling(
        temperature=0.8, top_k=4, presence_penalty=0.5, bias=((1, 1.0),), banned=((2, 0), (0, 1), (5,)), min_p=0.05
    ),
    "repetition, some allowed": Sampling(repetition_penalty=0.5, allowed=(0, 1, 2)),
}
EARLY = Limits(99, frozenset({1, 3}), min_end=len(PROMPT) + 1)
"""Stop tokens may come second, not first."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only get in each other's way on rows this short."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Alternating:
    """A grammar: the text begins with 0, 2 or 5, and goes on with an odd token behind an even one, and conversely."""

    def advance(self, tokens: Sequence[Token]) -> None:
        raise AssertionError("nothing is committed here")

    def bits(self, path: Sequence[Token]) -> Tensor | None:
        allowed = {0, 2, 5}
        for token in path:
            if token not in allowed:
                return None
            allowed = {other for other in range(TOKENS) if (other - token) % 2}
        return torch.tensor([sum(1 << token for token in allowed)], dtype=torch.int32)


def shaping(sampling: Sampling, mask: Any | None = None) -> Shaping:
    return Shaping(Open(SessionId(1), 1, PROMPT, sampling, EARLY), list(PROMPT), TOKENS, mask)


def decode(sampling: Sampling, told: Shaping, guessed: Shaping) -> tuple[Tensor, float]:
    """The first two tokens of every session, ``[SESSIONS, 2]``, and the mean number of drafts kept of two."""
    seeded = [replace(sampling, seed=i) for i in range(SESSIONS)]
    at = [[Draw(one, POSITION + ahead) for one in seeded] for ahead in range(3)]
    first = draw_sparse(_rows(DRAFTER, guessed, [()]).expand(SESSIONS, -1), at[0])
    behind = _rows(DRAFTER, guessed, [(token,) for token in range(TOKENS)])
    second = draw_sparse(behind[[draft.token for draft in first]], at[1])
    paths = [(), *((a,) for a in range(TOKENS)), *((a, b) for a in range(TOKENS) for b in range(TOKENS))]
    rows_NV, place = _rows(TARGET, told, paths), {path: i for i, path in enumerate(paths)}
    chains = [(one.token, two.token) for one, two in zip(first, second, strict=True)]
    wanted = [place[chain[:ahead]] for chain in chains for ahead in range(3)]
    draws = [draw for session in zip(*at, strict=True) for draw in session]
    walks = verify_chains(rows_NV[wanted], draws, list(zip(first, second, strict=True)))
    texts = [[*chain[: len(walk.kept)], walk.own] for chain, walk in zip(chains, walks, strict=True)]
    short = [i for i, text in enumerate(texts) if len(text) == 1]
    following = sample(rows_NV[[place[texts[i][0],] for i in short]], [at[1][i] for i in short])
    for i, token in zip(short, following, strict=True):
        texts[i].append(token)
    return torch.tensor([text[:2] for text in texts]), sum(len(walk.kept) for walk in walks) / SESSIONS


def _rows(logits: Tensor, how: Shaping, paths: list[tuple[int, ...]]) -> Tensor:
    """A model's shaped rows behind each path; it knows the last token only."""
    last = [path[-1] if path else TOKENS for path in paths]
    return shaped(logits[last], [how.after(path) for path in paths])


def promised(sampling: Sampling, mask: Any | None = None) -> Tensor:
    """The joint distribution of the first two tokens under plain decoding, ``[TOKENS, TOKENS]``."""
    told, draw = shaping(sampling, mask), Draw(sampling, 0)
    paths = [(token,) for token in range(TOKENS)]
    (first_V,) = filtered_log_probs(_rows(TARGET.double(), told, [()]), [draw]).exp()
    return first_V[:, None] * filtered_log_probs(_rows(TARGET.double(), told, paths), [draw] * TOKENS).exp()


@pytest.mark.parametrize("name", CASES)
def test_committed_tokens_have_the_law_that_was_asked_for(name: str) -> None:
    sampling = CASES[name]
    texts, kept = decode(sampling, shaping(sampling), shaping(sampling))
    assert 1.0 < kept < 1.95
    joint = promised(sampling)
    unshaped = Sampling(sampling.temperature, sampling.top_k, min_p=sampling.min_p)
    assert deviation(texts, joint) < LARGEST_DEVIATION
    assert float((joint - promised(unshaped)).abs().max()) > 0.02


def test_a_drafter_that_shapes_otherwise_costs_acceptance_only() -> None:
    sampling = CASES["all"]
    texts, kept = decode(sampling, shaping(sampling), shaping(Sampling(temperature=0.8)))
    assert deviation(texts, promised(sampling)) < LARGEST_DEVIATION
    assert kept < 1.0


def test_drafts_that_do_not_count_before_they_are_committed_are_found() -> None:
    class Forgetful(Shaping):
        def after(self, path):  # type: ignore[no-untyped-def]
            return super().after(())

    sampling = CASES["frequency"]
    forgetful = Forgetful(Open(SessionId(1), 1, PROMPT, sampling, EARLY), list(PROMPT), TOKENS)
    texts, _ = decode(sampling, forgetful, shaping(sampling))
    assert deviation(texts, promised(sampling)) > LARGEST_DEVIATION


MASKED = {
    "alone": Sampling(),
    "and all else": Sampling(temperature=0.8, top_k=4, frequency_penalty=-1.0, bias=((1, 1.0),), banned=((2, 3),)),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("drafter_knows", [True, False])
def test_what_a_grammar_leaves_has_the_law_that_was_asked_for(name: str, drafter_knows: bool) -> None:
    """Also where the drafter has not compiled it: then it costs acceptance."""
    sampling, mask = MASKED[name], Alternating()
    texts, kept = decode(sampling, shaping(sampling, mask), shaping(sampling, mask if drafter_knows else None))
    assert deviation(texts, promised(sampling, mask)) < LARGEST_DEVIATION
    assert 1.0 < kept < 1.95 if drafter_knows else 0.2 < kept < 1.0
    assert deviation(texts, promised(sampling)) > LARGEST_DEVIATION


def test_a_grammar_that_does_not_follow_drafts_is_found() -> None:
    class Forgetful(Alternating):
        def bits(self, path: Sequence[Token]) -> Tensor | None:
            return super().bits(())

    sampling = MASKED["alone"]
    texts, _ = decode(sampling, shaping(sampling, Forgetful()), shaping(sampling, Alternating()))
    assert deviation(texts, promised(sampling, Alternating())) > LARGEST_DEVIATION
