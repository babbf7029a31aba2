"""How many tokens a step each way to draft gives by itself: a draft model, an EAGLE-3 head; in chains.

    python -m benchmarks.heads --tokens 128

The bundled target writes greedily behind prompts that nothing was trained on. A step begins where the one before ended,
drafts a chain, and ends at its first token that is not the target's; that one comes from the target. What is drafted
behind the target's own tokens is all that counts, so every place is asked once (:mod:`benchmarks.fit.teacher`): no
serving, no time. The EAGLE-3 head is also asked with the states that it reads rounded as they are where it drafts away
from the target.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partialmethod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from alignment.writing import Writer
from benchmarks.fit import teacher
from benchmarks.fit.command import FitOptions
from benchmarks.fit.serving import TargetText
from benchmarks.harness.measure import reached
from benchmarks.harness.pair import BUNDLED, DRAFT, EAGLE, held_out
from benchmarks.harness.report import tell
from cluster.console import say
from engine.eagle.cached import packed, unpacked
from engine.eagle.head import EagleHead
from models.pair import load
from simulation.agreement import AgreementPassage
from speculation.messages import FeatureFormat, Features, SessionId

FUSE = EagleHead.fuse


def _sent(head: EagleHead, wanted: FeatureFormat, aux_1TA: Tensor) -> Tensor:
    """The states as a drafter elsewhere has them, ``[1, T, D]``."""
    states_TD = FUSE(head, aux_1TA)[0]
    values, scales = packed(states_TD, wanted)
    features = Features(SessionId(0), 0, 0, 0, states_TD.shape[1], values, wanted, scales)
    return unpacked(features, states_TD.shape[1], torch.float32)[None]


def kept(passage: AgreementPassage, depth: int) -> list[int]:
    """Of each step of greedy decoding, from the second token on: how many drafts it keeps."""
    found: list[int] = []
    place = 1
    while place + depth <= len(passage.tokens):
        found.append(passage.kept(place, depth))
        place += found[-1] + 1
    return found


def figures(kept: Sequence[int], depth: int) -> dict[str, Any]:
    """Tokens a step, the target's own included, and the share of steps that keep so many drafted tokens or more."""
    steps = len(kept)
    return {
        "tokens_per_step": round(1 + sum(kept) / steps, 3),
        "drafted_tokens_kept": round(sum(kept) / steps, 3),
        "steps_reaching_place": reached(kept, depth),
        "steps": steps,
    }


def main(prompts: int, tokens: int, depth: int) -> None:
    """Measure and print, a line of JSON for each way."""
    began = time.monotonic()
    target: Any = load(BUNDLED, torch.float32)
    writer = Writer(target, {target.config.eos_token_id}, target.config.vocab_size)
    written = writer.write([*held_out(prompts)], tokens, 0.0, 0)
    texts = [TargetText("", row.tokens[: row.start], row.tokens[row.start :]) for row in written]
    told = FitOptions(target=str(BUNDLED), dtype="float32", device="cpu")

    def show(way: str, passages: Sequence[AgreementPassage]) -> None:
        found = [count for passage in passages for count in kept(passage, depth)]
        tell({"way": way, "depth": depth, **figures(found, depth)})

    drafted = teacher.passages(told, str(DRAFT), texts)
    show("draft model", drafted)
    for sent in (None, *FeatureFormat):
        fuse = partialmethod(_sent, sent)
        with patch.object(EagleHead, "fuse", fuse) if sent is not None else nullcontext():
            by_age = teacher.by_age(replace(told, eagle=str(EAGLE)), texts)
        asked = [replace(one, places=(), by_age=each) for one, each in zip(drafted, by_age, strict=True)]
        show("eagle" if sent is None else f"eagle, states in {sent}", asked)
    say(f"{len(written)} prompts, up to {tokens} tokens each, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Tokens a step of ways to draft, greedy, in chains")
    parser.add_argument("--prompts", type=int, default=40, help="prompts (default: 40, all there are)")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt (default: 128)")
    parser.add_argument("--depth", type=int, default=5, help="drafted tokens of a step, at most (default: 5)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    main(chosen.prompts, chosen.tokens, chosen.depth)
