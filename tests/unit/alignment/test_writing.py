"""What a target writes is what its logits say, whatever else its folder asks of generation."""

from __future__ import annotations

import pytest
import torch

from alignment.writing import Writer
from models.pair import ModelShape, build

PROMPTS = ((5, 6, 7, 5, 6), (9, 9, 9), (200, 30, 4, 30))


@pytest.mark.parametrize(
    "asked",
    [{"repetition_penalty": 1.5}, {"min_new_tokens": 8}, {"num_beams": 2}, {"return_dict_in_generate": True}],
    ids=lambda asked: next(iter(asked)),
)
def test_what_a_folder_asks_of_generation_is_not_the_targets_own(asked: dict[str, object]) -> None:
    model = build(ModelShape(hidden_size=16, layers=1, heads=2, kv_heads=2, intermediate_size=24), 64, 0, seed=1)
    model.eval()
    model.generation_config.update(**asked)
    with torch.no_grad():
        first = model(input_ids=torch.tensor(PROMPTS[:1])).logits[0, -1].argmax().item()
    kept = model.generation_config
    for row in Writer(model, {first} if "min_new_tokens" in asked else ()).write(PROMPTS, 8, 0.0, seed=0):
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([row.tokens[:-1]])).logits[0, row.start - 1 :]
        assert logits_TV.argmax(-1).tolist() == list(row.tokens[row.start :])
    assert model.generation_config is kept
