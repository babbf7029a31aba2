"""What a target writes is what its logits say, whatever else its folder asks of generation."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from alignment.writing import Writer, WrittenRow, written_rows
from models.pair import VOCABULARY, ModelShape, build

PROMPTS = ((5, 6, 7, 5, 6), (9, 9, 9), (200, 30, 4, 30))
SHAPE = ModelShape(hidden_size=16, layers=1, heads=2, kv_heads=2, intermediate_size=24)


@pytest.mark.parametrize(
    "asked",
    [{"repetition_penalty": 1.5}, {"min_new_tokens": 8}, {"num_beams": 2}, {"return_dict_in_generate": True}],
    ids=lambda asked: next(iter(asked)),
)
def test_what_a_folder_asks_of_generation_is_not_the_targets_own(asked: dict[str, object]) -> None:
    model = build(SHAPE, 64, 0, seed=1)
    model.eval()
    model.generation_config.update(**asked)
    with torch.no_grad():
        first = model(input_ids=torch.tensor(PROMPTS[:1])).logits[0, -1].argmax().item()
    kept = model.generation_config
    stops = {first} if "min_new_tokens" in asked else ()
    for row in Writer(model, stops, model.config.vocab_size).write(PROMPTS, 8, 0.0, seed=0):
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([row.tokens[:-1]])).logits[0, row.start - 1 :]
        assert logits_TV.argmax(-1).tolist() == list(row.tokens[row.start :])
    assert model.generation_config is kept


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_the_output_layer_is_never_written(temperature: float) -> None:
    model = build(SHAPE, 64, 0, seed=1)
    model.eval()
    with torch.no_grad():
        model.lm_head.weight[VOCABULARY:] *= 100.0
    rows = Writer(model, (), VOCABULARY).write(PROMPTS, 16, temperature, seed=0)
    assert max(max(row.tokens) for row in rows) < VOCABULARY


def test_rows_kept_with_what_is_no_token_are_written_again(tmp_path: Path) -> None:
    kept = [WrittenRow((5, 6), 1, 0.0)], [WrittenRow((5, 4001), 1, 0.0)]
    for number, rows in enumerate(kept):
        (tmp_path / f"a-{number:05}.json").write_text(json.dumps([astuple(row) for row in rows]))
    asked: list[int] = []

    def write(number: int) -> list[WrittenRow]:
        asked.append(number)
        return [WrittenRow((5, 7), 1, 0.0)]

    for _ in range(2):
        found = written_rows(tmp_path, 2, "a", VOCABULARY, write, lambda: None)
        assert (found, asked) == ([WrittenRow((5, 6), 1, 0.0), WrittenRow((5, 7), 1, 0.0)], [1])
