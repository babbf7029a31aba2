"""Requests of different lengths, as chat traffic has them.

Equal lengths are the best case of a padded batch. In traffic both prompts and answers spread widely; here they are
drawn from log-normal distributions in the proportions of ShareGPT's conversations, whose mean prompt has 161 tokens and
whose mean answer 338 (Kwon et al. 2023, "Efficient memory management for large language model serving with
PagedAttention", section 6.1). All lengths are divided by :data:`SHORTENED` so that a batch takes seconds on one core.
The paper shows the spread but gives no figure for it: we take a standard deviation as large as the mean. The draw is
the same in every run; only the tokens of the prompts are new ones.
"""

from __future__ import annotations

import math
from random import Random

from torch import Generator

from benchmarks.engine_model import random_prompts
from benchmarks.measure import Batch

SEED = 0
MEAN_PROMPT, MEAN_ANSWER = 161, 338
"""Tokens, before they are shortened."""
SHORTENED = 4
SPREAD = math.sqrt(math.log(2.0))
"""Standard deviation of a length's logarithm: that of the length equals its mean."""
LONGEST_PROMPT, LONGEST_ANSWER = 256, 256
"""Tokens at most."""


def lengths(count: int) -> list[tuple[int, int]]:
    """Tokens of prompt and answer for ``count`` requests."""
    rng = Random(SEED)
    return [
        (_length(rng, MEAN_PROMPT, LONGEST_PROMPT), _length(rng, MEAN_ANSWER, LONGEST_ANSWER)) for _ in range(count)
    ]


def _length(rng: Random, mean: float, longest: int) -> int:
    centre = math.log(mean / SHORTENED) - SPREAD**2 / 2
    return min(max(round(rng.lognormvariate(centre, SPREAD)), 1), longest)


def mixed_batch(count: int, generator: Generator) -> Batch:
    """``count`` requests at once, with prompts that share no beginning."""
    drawn = lengths(count)
    prompts = tuple(random_prompts(1, tokens, generator)[0] for tokens, _ in drawn)
    return Batch(prompts, max(answer for _, answer in drawn), each=tuple(answer for _, answer in drawn))
