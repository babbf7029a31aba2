"""Small random EAGLE-3 heads beside a small target, loops that draft with them, and what the heads must have read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draft_service.eagle import HeadInTurn
from engine.attention.attention import Step
from engine.build import welcome
from engine.cache.kv_cache import KVCache
from engine.eagle.cached import CachedHead
from engine.eagle.config import EagleConfig
from engine.eagle.head import EagleHead
from engine.interface import StepEngine
from engine.model import Model
from engine.settings import EngineSettings
from engine.step import Engine
from speculation.messages import Limits, Open, Sampling, SessionId, Source, Speculation, Token, Verification
from speculation.trie import Node
from target_service.drafting.eagle import EagleDrafter
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.by_rows import PlainRows, Recorder
from tests.unit.engine.engine_models import Stock, random_tokens

LINK = "router"
HIDDEN, VOCABULARY, LAYERS = 64, 256, 4
AUX = (2, 1, 3)
NEW = 16
ALONE = Speculation(sources=frozenset({Source.EAGLE}))
PLAIN = Speculation(enabled=False)
GREEDY, WARM = Sampling(temperature=0.0), Sampling(temperature=0.8, seed=5)


def config_of(**changes: Any) -> EagleConfig:
    known: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": 100,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "aux_layers": AUX,
    }
    return EagleConfig(**{**known, **changes})


def tiny_head(**changes: Any) -> EagleHead:
    """A random one, which can say every second of the target's tokens."""
    head = EagleHead(config_of(**changes))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15, generator=generator)
    if head.config.draft_vocab_size < VOCABULARY:
        head.target_ids = 2 * torch.arange(head.config.draft_vocab_size)
    return head.eval().requires_grad_(False)


def engine_of(model: Model, head: EagleHead | None, capacity: int = 1024) -> Engine:
    cache = KVCache(model.layers, capacity, block=model.block, dtype=model.dtype, device=model.device)
    return Engine(model, cache, eagle=head)


def loop_of(engine: StepEngine, **limits: object) -> VerifyLoop:
    """Verifies all there is, so that what is tested does not depend on how fast the machine is."""
    chosen = replace(TargetLimits(adaptive=False), **limits)  # type: ignore[arg-type]
    return VerifyLoop(engine, welcome(EngineSettings("tiny"), engine.model, "target"), chosen)


def opening(number: int, sampling: Sampling, speculation: Speculation = ALONE, new: int = NEW) -> Open:
    prompt = tuple(random_tokens(10 + number, seed=number))
    chosen = replace(sampling, seed=sampling.seed + number)
    return Open(SessionId(number), 1, prompt, chosen, Limits(len(prompt) + new), speculation=speculation)


def texts(loop: VerifyLoop, openings: Sequence[Open]) -> dict[int, list[Token]]:
    """What the sessions say, all at once."""
    for one in openings:
        loop.receive(LINK, one)
    said: dict[int, list[Token]] = {one.session: [] for one in openings}
    while (sent := loop.step()) is not None:
        loop.validate()
        for _, message in sent:
            assert isinstance(message, Verification), message
            said[message.session] += message.tokens
    assert loop.load().free_tokens == loop.load().capacity_tokens
    return said


def plain_texts(model: Model, openings: Sequence[Open]) -> dict[int, list[Token]]:
    return texts(loop_of(engine_of(model, None)), [replace(one, speculation=PLAIN) for one in openings])


def of_eagle(loop: VerifyLoop) -> HeadInTurn:
    """What drafts beside the target."""
    (drafter,) = loop._drafters
    assert isinstance(drafter, EagleDrafter)
    return drafter._drafter


def drafted(loop: VerifyLoop) -> list[list[Node]]:
    """What a head has drafted by now, of each session."""
    return [[*sequence.session.trie] for sequence in of_eagle(loop)._sequences.values()]


def assert_empty(loop: VerifyLoop) -> None:
    """Nothing is left of any session."""
    (drafter,) = loop._drafters
    assert isinstance(drafter, EagleDrafter)
    head = drafter._drafter
    assert not drafter._open and not drafter._unread and not head._sequences and not head._head._known
    assert not head._head.cache.sequences


def recorded_head(head: EagleHead, capacity: int, context: int) -> CachedHead:
    """As on CUDA: computed by rows, every forward and level a recording that is played again."""
    heads_per_key = head.config.num_attention_heads // head.config.num_key_value_heads
    return CachedHead(head, capacity, context, attention=PlainRows(heads_per_key), record=Recorder())


class Watched(CachedHead):
    """Notes what the rows of committed tokens come to: those that read a true state."""

    def __init__(self, head: EagleHead, capacity: int, context: int) -> None:
        super().__init__(head, capacity, context)
        self.read: dict[tuple[int, int], Tensor] = {}
        self._true: set[bytes] = set()
        fuse = head.fuse

        def noted(aux_NA: Tensor) -> Tensor:
            states_ND: Tensor = fuse(aux_NA)
            self._true |= {state_D.numpy().tobytes() for state_D in states_ND}
            return states_ND

        head.fuse = noted  # type: ignore[method-assign]

    def normed(self, step: Step, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        states_TD = self.states(step)
        normed_TD = super().normed(step, tokens_T, positions_T)
        for token, position, state_D, normed_D in zip(tokens_T, positions_T, states_TD, normed_TD, strict=True):
            if state_D.numpy().tobytes() in self._true:
                self.read[int(position) - 1, int(token)] = normed_D
        return normed_TD


def watched(loop: VerifyLoop) -> Watched:
    """The head of a loop, where ``own_drafters`` makes those."""
    head = of_eagle(loop)._head._head
    assert isinstance(head, Watched)
    return head


def reference(folder: str, head: EagleHead, tokens: Sequence[Token]) -> Tensor:
    """The normed states of all rows by transformers' hidden states and one causal pass, ``[T - 1, D]``."""
    module = Stock(folder)._module
    with torch.inference_mode():
        hidden = module(input_ids=torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        states_ND = head.fuse(torch.cat([hidden[layer][0] for layer in head.config.aux_layers], -1))[:-1]

        def attend(_layer: int, q_NQE: Tensor, k_NKE: Tensor, v_NKE: Tensor) -> Tensor:
            q_QNE, k_KNE, v_KNE = (x.transpose(0, 1) for x in (q_NQE, k_NKE, v_NKE))
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(q_QNE, k_KNE, v_KNE, is_causal=True, enable_gqa=True).transpose(0, 1)

        embedded = head.embed(torch.tensor(tokens[1:]))
        found: tuple[Tensor, Tensor] = head(embedded, states_ND, torch.arange(len(tokens) - 1), attend)
    return found[1]
