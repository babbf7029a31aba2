"""The model that the engine benchmark runs, how much of everything it needs, and what it is asked.

A Llama of random weights, which are noise because speed does not depend on them. Its text is senseless but not
degenerate, and its greedy choices are close ones: in bfloat16 two correct implementations soon write different texts.

Requests have different lengths, as chat traffic has them: equal ones are the best case of a padded batch. In traffic
both prompts and answers spread widely; here they are drawn from log-normal distributions in the proportions of
ShareGPT's conversations, whose mean prompt has 161 tokens and whose mean answer 338 (Kwon et al. 2023, "Efficient
memory management for large language model serving with PagedAttention", section 6.1). All lengths are divided by
:data:`SHORTENED` so that a batch takes seconds on one core. The paper shows the spread but gives no figure for it: we
take a standard deviation as large as the mean. The draw is the same in every run; only the tokens of the prompts are
new ones.

What a target worker process holds in memory beyond its weights, its cache and the numbers of one step is taken from a
real ``paceline worker target``, without Ray, after it has served one batch of requests: everything resident (shared
libraries in full, as if no other process used them), less what is known to be needed:

- weights: every parameter once;
- cache: all of its slots; the worker gets no more of them than the batch needs, so that none stays untouched;
- activations: the widest place of the largest step (see :func:`activations`), a low estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.engine.settings import EXPANSION, GROUP, HEAD_SIZE, EngineShape
from benchmarks.harness.measure import Batch
from cluster.config.config import Config
from engine.head_files import placed
from models.pair import parameter_count

SEED = 0
VOCABULARY = 8192
LONGEST = 4096
SPREAD = 0.03
"""Standard deviation of the weights. With less, such a model repeats one token for ever."""
MEAN_PROMPT, MEAN_ANSWER = 161, 338
"""Tokens, before they are shortened."""
SHORTENED = 4
LENGTH_SPREAD = math.sqrt(math.log(2.0))
"""Standard deviation of a length's logarithm: that of the length equals its mean."""
LONGEST_PROMPT, LONGEST_ANSWER = 256, 256
MEGABYTE = 1e6


def config(shape: EngineShape) -> LlamaConfig:
    """In the proportions of the Llama 3.2 of a billion: tied embeddings, grouped queries, a wide MLP."""
    heads = shape.hidden // HEAD_SIZE
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=EXPANSION * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // GROUP,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        initializer_range=SPREAD,
    )


def write_model(shape: EngineShape, folder: Path) -> None:
    """A checkpoint in bfloat16, the same for the same shape."""
    torch.manual_seed(SEED)
    placed(LlamaForCausalLM(config(shape)), torch.bfloat16).save_pretrained(folder)


def random_prompts(count: int, tokens: int, generator: torch.Generator) -> list[tuple[int, ...]]:
    """Prompts that share no beginning."""
    return [tuple(row) for row in torch.randint(VOCABULARY, (count, tokens), generator=generator).tolist()]


def parameters(shape: EngineShape) -> int:
    """Tied ones once. A step reads every one of them once: the embedding is the output layer."""
    with torch.device("meta"):
        return parameter_count(LlamaForCausalLM(config(shape)))


def activations(shape: EngineShape, tokens: int, rows: int) -> int:
    """Numbers alive at the widest place of a step, about: residual, norm, the MLP's three products, and logits.

    ``rows``: of logits, counted three times, as the model's number format and as float32.
    """
    return tokens * (2 * shape.hidden + 3 * EXPANSION * shape.hidden) + 3 * rows * VOCABULARY


def lengths(count: int) -> list[tuple[int, int]]:
    """Tokens of prompt and answer for ``count`` requests."""
    rng = Random(SEED)
    return [
        (_length(rng, MEAN_PROMPT, LONGEST_PROMPT), _length(rng, MEAN_ANSWER, LONGEST_ANSWER)) for _ in range(count)
    ]


def _length(rng: Random, mean: float, longest: int) -> int:
    centre = math.log(mean / SHORTENED) - LENGTH_SPREAD**2 / 2
    return min(max(round(rng.lognormvariate(centre, LENGTH_SPREAD)), 1), longest)


def mixed_batch(count: int, generator: torch.Generator) -> Batch:
    """``count`` requests at once, with prompts that share no beginning."""
    drawn = lengths(count)
    prompts = tuple(random_prompts(1, tokens, generator)[0] for tokens, _ in drawn)
    return Batch(prompts, max(answer for _, answer in drawn), each=tuple(answer for _, answer in drawn))


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one worker process, in bytes."""

    resident: int
    private: int
    """Those that no other process shares at the moment."""
    weights: int
    cache: int
    activations: int

    @property
    def overhead(self) -> int:
        """What is left: interpreter, libraries, allocator, copies."""
        return self.resident - self.weights - self.cache - self.activations


def memory_of(process: int, shape: EngineShape, item: int, slots: int, rows: int) -> Memory:
    """Of the worker with this process id; ``item``: bytes of a number, ``rows``: of logits in its widest step."""
    fields = read_rollup(Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii"))
    return Memory(
        resident=fields["Rss"],
        private=fields["Private_Clean"] + fields["Private_Dirty"],
        weights=item * parameters(shape),
        cache=item * slots * 2 * shape.layers * shape.hidden // GROUP,
        activations=item * activations(shape, Config().target.prompt_tokens, rows),
    )


def read_rollup(text: str) -> dict[str, int]:
    """The fields of ``/proc/PID/smaps_rollup`` (proc_pid_smaps(5)), in bytes."""
    lines = (line.split() for line in text.splitlines()[1:])
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
