"""What runs on a GPU computes what the CPU computes. Run with `make test ARGS=tests/gpu` on a machine that has one."""

import pytest
import torch

from engine.build import build
from engine.interface import Chunk
from engine.loading.quantisation import FP8_CAPABILITY
from engine.sampling.sampling import Draw, sample
from engine.settings import EngineSettings
from speculation import noise
from speculation.messages import Sampling
from tests.bundled import MODELS, held_out_prompts
from tests.noise_words import noise_bits

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: GPU equality is not checked here"
)


def test_noise_words_are_the_references_bit_for_bit() -> None:
    keys = [noise.key(seed, position) for seed in (0, 1, 2**64 - 1) for position in (0, 5, 100_000)]
    words_NV = noise_bits(keys, 4096, torch.device("cuda")).cpu() & noise.MASK32
    for row, key in enumerate(keys):
        for token in (0, 1, 77, 4095):
            assert int(words_NV[row, token]) == noise.bits(key, token)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=0.8, seed=3),
        Sampling(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, seed=4),
    ],
)
def test_coupled_draws_are_the_same(sampling: Sampling) -> None:
    logits_NV = torch.randn(64, 4000, generator=torch.Generator().manual_seed(1)) * 3
    draws = [Draw(sampling, position) for position in range(64)]
    assert sample(logits_NV.cuda(), draws) == sample(logits_NV, draws)


def test_greedy_text_is_the_same_in_float32() -> None:
    texts = []
    for device in ("cpu", "cuda"):
        engine = build(EngineSettings(str(MODELS / "target"), dtype="float32", device=device))
        sequence = engine.cache.sequence()
        tokens = list(held_out_prompts()[0])
        for _ in range(24):
            fed = tokens[sequence.length :]
            logits_RV = engine.run([Chunk(sequence, fed, rows=[len(fed) - 1])])
            sequence.advance(range(len(fed)))
            tokens += sample(logits_RV, [Draw(Sampling(temperature=0.0), len(tokens))])
        texts.append(tokens)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_a_quantised_model_still_says_the_same(quantization: str) -> None:
    if quantization == "fp8" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("this GPU does not multiply fp8")
    predictions = []
    for chosen in ("none", quantization):
        settings = EngineSettings(str(MODELS / "target"), dtype="bfloat16", device="cuda", quantization=chosen)
        engine = build(settings)
        for prompt in held_out_prompts()[:20]:
            sequence = engine.cache.sequence()
            logits_RV = engine.run([Chunk(sequence, prompt, rows=range(len(prompt)))])
            sequence.free()
            predictions.append(logits_RV.argmax(-1))
    original, quantised = torch.cat(predictions[:20]), torch.cat(predictions[20:])
    assert (original == quantised).float().mean() >= 0.95
