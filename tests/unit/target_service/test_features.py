"""Features of a head on their way to the drafter that has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from engine.eagle.cached import unpacked
from engine.eagle.head import EagleHead
from speculation.messages import FeatureFormat, Features
from target_service.drafting.features import SENT_AT_ONCE, FeatureSender
from target_service.sequence import TargetSequence
from target_service.step_account import TargetCounters
from transport import codec

SEQUENCE = cast(
    TargetSequence, SimpleNamespace(link="r", session=SimpleNamespace(opened=SimpleNamespace(session=1, epoch=1)))
)


@pytest.mark.parametrize(
    ("width", "how", "messages"),
    [
        (8192, FeatureFormat.BF16, 2),
        (12_288, FeatureFormat.BF16, 4),
        (12_288, FeatureFormat.FP8, 2),
        (1 << 16, FeatureFormat.FP8, 8),
        (1 << 16, FeatureFormat.BF16, 16),
    ],
)
def test_whatever_the_width_of_a_head_its_drafter_can_read_what_is_sent(
    width: int, how: FeatureFormat, messages: int
) -> None:
    sender = FeatureSender(cast(EagleHead, SimpleNamespace(fingerprint=7)), TargetCounters())
    states_ND = torch.arange(2 * SENT_AT_ONCE)[:, None].expand(-1, width) / 8.0
    sender._send(how, [(SEQUENCE, 1, states_ND)])
    read = [codec.decode_to_worker(codec.encode_to_worker(message)) for _, message in sender.features()]
    found = [one for one in read if isinstance(one, Features)]
    assert len(found) == messages and max(map(len, found)) <= SENT_AT_ONCE
    assert [one.position for one in found] == [1, *(one.end for one in found[:-1])]
    found_ND = torch.cat([unpacked(one, width, torch.float32) for one in found])
    torch.testing.assert_close(found_ND, states_ND, rtol=0.07, atol=0.02)
