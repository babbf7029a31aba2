"""In bfloat16 on a CPU a token's logits have the same bits however it is batched: near ties cannot fall otherwise."""

from random import Random

import pytest
import torch

from engine.build import EngineSettings, build
from engine.linear import PackedLinear
from engine.step import Chunk
from tests.stack import MODELS, held_out_prompts, needs_invariant_bf16


@needs_invariant_bf16
@pytest.mark.parametrize("inputs", [64, 704, 1024, 2816, 4096])
def test_a_row_of_a_linear_layer_does_not_depend_on_the_others(inputs):
    torch.manual_seed(inputs)
    layer = PackedLinear(torch.randn(512, inputs, dtype=torch.bfloat16), None)
    x_NI = torch.randn(70, inputs, dtype=torch.bfloat16)
    with torch.inference_mode():
        alone_NO = torch.cat([layer(x_NI[i : i + 1]) for i in range(len(x_NI))])
        for rows in (2, 3, 5, 9, 16, 33, 70):
            assert torch.equal(layer(x_NI[:rows]), alone_NO[:rows])


@needs_invariant_bf16
@pytest.mark.parametrize("model", ["target", "slow_target"])
def test_logits_do_not_depend_on_how_tokens_are_batched(model, request):
    folder = MODELS / "target" if model == "target" else request.getfixturevalue("slow_target")
    engine = build(EngineSettings(str(folder), dtype="bfloat16", cache_tokens=2048))
    prompt, *others = (list(tokens[:40]) for tokens in held_out_prompts()[:4])
    rng = Random(7)
    text = prompt + [rng.randrange(engine.model.vocabulary) for _ in range(90)]

    def logits(sizes: list[int], crowded: bool) -> torch.Tensor:
        """All rows of ``text``, fed in chunks of these sizes, junk rolled back in between, others in the batch."""
        sequence, rows = engine.cache.sequence(), []
        crowd = [engine.cache.sequence() for _ in others] if crowded else []
        for size in sizes:
            fed = text[sequence.length : sequence.length + size]
            chunks = [Chunk(sequence, fed, rows=range(len(fed)))]
            chunks += [Chunk(other, [rng.randrange(1000)]) for other in crowd]
            rows.append(engine.run(chunks)[: len(fed)])
            sequence.advance(range(len(fed)))
            for other in crowd:
                other.advance([0])
            engine.run([Chunk(sequence, [5, 6, 7])])
            sequence.rollback()
        for used in (sequence, *crowd):
            used.free()
        return torch.cat(rows)

    one_by_one = logits([1] * len(text), crowded=False)
    assert torch.equal(logits([len(text)], crowded=False), one_by_one)
    assert torch.equal(logits([40, *[9] * 10], crowded=False), one_by_one)
    assert torch.equal(logits([40, *[3, 1, 8, 5, 1] * 5], crowded=True), one_by_one)
