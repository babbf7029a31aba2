"""How many tokens a step each way to draft gives by itself: a draft model, Medusa heads, an EAGLE-3 head; in chains.

    python -m benchmarks.heads --tokens 128

The bundled target writes greedily behind prompts that nothing was trained on. A step begins where the one before ended,
drafts a chain, and ends at its first token that is not the target's; that one comes from the target. What is drafted
behind the target's own tokens is all that counts, so every place is computed at once, from the text: no serving, no
time. The draft model reads all of the text; heads read hidden states of all but its last token. The EAGLE-3 head also
reads them as they are rounded where it drafts away from the target.

Tensor legend: T tokens, N places, K guesses in a row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignment.heads.eagle import guesses, read_target
from alignment.writing import Writer
from benchmarks.harness.pair import BUNDLED, EAGLE, HEADS, ROOT, held_out
from benchmarks.harness.report import tell
from cluster.console import say
from engine.eagle.cached import packed, unpacked
from engine.eagle.loading import load_alone
from engine.medusa import read
from models.pair import load
from speculation.messages import FeatureFormat, Features, SessionId

CPU = torch.device("cpu")
Guesses = Callable[[Tensor], Tensor]
"""Of a text ``[T]``: column p holds what is drafted behind token p, ``[K, T]``; -1: nothing."""


def draft_model(folder: Path, depth: int) -> Guesses:
    """A chain of a draft model is its next choices, as long as they are the text's own."""
    model: Any = load(folder, torch.float32)

    def guess(tokens_T: Tensor) -> Tensor:
        said_T = model(input_ids=tokens_T[None], use_cache=False).logits[0].argmax(-1)
        return _columns([said_T[step:] for step in range(depth)], 0, len(tokens_T))

    return guess


def medusa(target: Any, folder: Path) -> Guesses:
    """Head i, where token p - 1 was read, guesses token p + 1 + i."""
    heads = read(folder).float()

    def guess(tokens_T: Tensor) -> Tensor:
        hidden_TD = target(input_ids=tokens_T[None], output_hidden_states=True).hidden_states[-1][0]
        return _columns(list(heads(hidden_TD).argmax(-1)), 1, len(tokens_T))

    return guess


def eagle(target: Any, folder: Path, depth: int, sent: FeatureFormat | None = None) -> Guesses:
    """The state of token p - 1 with the embedding of token p guesses token p + 1, and on from there.

    ``sent``: how the states are rounded on their way from the target; None: the head is there, too.
    """
    head = load_alone(str(folder), str(BUNDLED), CPU, torch.float32)
    if sent is not None:
        head.fuse = partial(_sent, head.fuse, sent)  # type: ignore[method-assign]

    def guess(tokens_T: Tensor) -> Tensor:
        padded_1T = torch.cat((tokens_T, tokens_T[-1:].expand(depth)))[None]
        aux_1TA, _ = read_target(target, padded_1T, head.config)
        return _columns(list(guesses(head, padded_1T, aux_1TA, depth)), 1, len(tokens_T))

    return guess


def _sent(fuse: Callable[[Tensor], Tensor], wanted: FeatureFormat, aux_1TA: Tensor) -> Tensor:
    """The states as a drafter elsewhere has them, ``[1, T, D]``."""
    states_TD = fuse(aux_1TA)[0]
    values, scales = packed(states_TD, wanted)
    features = Features(SessionId(0), 0, 0, 0, states_TD.shape[1], values, wanted, scales)
    return unpacked(features, states_TD.shape[1], torch.float32)[None]


def _columns(rows: Sequence[Tensor], behind: int, length: int) -> Tensor:
    """Rows of guesses as columns by the last token known, which is so many places behind what was read."""
    out_KT = torch.full((len(rows), length), -1)
    for step, row in enumerate(rows):
        row = row[: length - behind]
        out_KT[step, behind : behind + len(row)] = row
    return out_KT


def accepted(guess_KT: Tensor, tokens_T: Tensor, start: int) -> list[int]:
    """Of each step of greedy decoding, the first of which knows the text up to ``start``: how many drafts it keeps."""
    said_KT = _columns([tokens_T[1 + step :] for step in range(len(guess_KT))], 0, len(tokens_T))
    right_T = (guess_KT == said_KT).long().cumprod(0).sum(0)
    kept: list[int] = []
    place = start
    while place + len(guess_KT) < len(tokens_T):
        kept.append(int(right_T[place]))
        place += kept[-1] + 1
    return kept


def figures(kept: Sequence[int], depth: int) -> dict[str, Any]:
    """Tokens a step, the target's own included, and the share of steps that keep so many drafted tokens or more."""
    steps = len(kept)
    return {
        "tokens_per_step": round(1 + sum(kept) / steps, 3),
        "drafted_tokens_kept": round(sum(kept) / steps, 3),
        "steps_reaching_place": [round(sum(count > place for count in kept) / steps, 3) for place in range(depth)],
        "steps": steps,
    }


@torch.inference_mode()
def main(prompts: int, tokens: int, depth: int) -> None:
    """Measure and print, a line of JSON for each way."""
    target: Any = load(BUNDLED, torch.float32)
    ways = {
        "draft model": draft_model(ROOT / "models" / "draft", depth),
        "medusa": medusa(target, HEADS),
        "eagle": eagle(target, EAGLE, depth),
        **{f"eagle, states in {sent}": eagle(target, EAGLE, depth, sent) for sent in FeatureFormat},
    }
    began = time.monotonic()
    written = Writer(target, {target.config.eos_token_id}).write([*held_out(prompts)], tokens, 0.0, 0)
    for name, guess in ways.items():
        texts = [(torch.tensor(row.tokens), row.start) for row in written]
        kept = [count for row_T, start in texts for count in accepted(guess(row_T), row_T, start)]
        tell({"way": name, "depth": depth, **figures(kept, depth)})
    say(f"{len(written)} prompts, up to {tokens} tokens each, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Tokens a step of ways to draft, greedy, in chains")
    parser.add_argument("--prompts", type=int, default=40, help="prompts (default: 40, all there are)")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt (default: 128)")
    parser.add_argument("--depth", type=int, default=5, help="drafted tokens of a step, at most (default: 5)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    main(chosen.prompts, chosen.tokens, chosen.depth)
