"""What the names of models tell of their size."""

import pytest

from deploy.model_rules import least_bytes


@pytest.mark.parametrize(
    ("model", "gigabytes"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 16),
        ("meta-llama/Llama-3.3-70B-Instruct", 140),
        ("Qwen/Qwen3-30B-A3B", 60),
        ("Qwen/Qwen2.5-0.5B", 1),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", 70),
        ("org/without-a-size", 0),
        ("mistralai/Mixtral-8x7B-v0.1", 14),  # each expert; more is not known
    ],
)
def test_a_name_tells_the_least_that_its_weights_take(model: str, gigabytes: float) -> None:
    assert least_bytes(model) == gigabytes * 10**9
