"""How large the engine benchmark is, and the Llamas of random weights that engines are measured with.

Imports no torch but where such a model is looked at: a mistake on the command line is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from benchmarks.harness.options import Options, between, flag
from cluster.console import BadInput
from cluster.local.threads import usable_cores

if TYPE_CHECKING:
    from transformers import LlamaConfig

HEAD_SIZE, GROUP = 64, 4
"""Of the engine benchmark's model: of a head, and query heads that share a key head."""
VOCABULARY = 8192


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of one."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 32_768
    context: int = 8_192
    tied: bool = False
    spread: float = 0.02
    """Standard deviation of the weights."""

    @property
    def config(self) -> LlamaConfig:
        """As transformers has it."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.context,
            tie_word_embeddings=self.tied,
            initializer_range=self.spread,
            eos_token_id=None,  # texts end by length only
        )

    @property
    def weights_read(self) -> int:
        """Numbers that every step reads: all weights but the embedding, unless that is the output layer as well."""
        import torch
        from transformers import LlamaForCausalLM

        with torch.device("meta"):
            module = LlamaForCausalLM(self.config)
        embedding = 0 if self.tied else module.model.embed_tokens.weight.numel()
        return sum(parameter.numel() for parameter in module.parameters()) - embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(Options):
    """How large the model is, and how many cores compute.

    By default 260 million parameters: a quarter of the layers of the Llama 3.2 of a billion. With more and thinner
    layers, more of a step is overhead.
    """

    BENCH = "engine"
    ABOUT = "the target worker's engine: its steps, its batches and its memory, and transformers"
    DETAILS = "The quick run takes about four minutes, the full one about ten."
    MODULE = "benchmarks.engine.run"
    FOLDER = "-engine"
    quick: bool = flag(False, "fewer rounds; writes no folder")
    out: Path | None = flag(None, "folder of a full run (default: benchmarks/results/DATE-engine)", metavar="DIR")
    hidden: int = flag(2048, "hidden size of the model")
    layers: int = flag(4, "layers of the model", least=1)
    threads: int = flag(1, "cores, and threads of a step")

    def checked(self) -> Self:
        """See :class:`benchmarks.harness.options.Options`."""
        if self.hidden < (multiple := HEAD_SIZE * GROUP) or self.hidden % multiple:
            raise BadInput(f"--hidden must be a multiple of {multiple}, got {self.hidden}")
        between("--threads", self.threads, 1, usable_cores(), ", the cores usable here")
        return self

    @property
    def shape(self) -> LlamaShape:
        """In the proportions of the Llama 3.2 of a billion: tied embeddings, grouped queries, a wide MLP.

        With less spread of its weights, such a model repeats one token for ever.
        """
        heads = self.hidden // HEAD_SIZE
        size = self.hidden, 4 * self.hidden, self.layers, heads, heads // GROUP
        return LlamaShape(*size, vocabulary=VOCABULARY, context=4096, tied=True, spread=0.03)

    @property
    def rounds(self) -> int:
        """Times every step and every way to read is timed."""
        return 12 if self.quick else 40

    @property
    def turns(self) -> int:
        """Times every contender decodes, and pairs of prompts with the same prefix."""
        return 3 if self.quick else 7

    @property
    def mixed_turns(self) -> int:
        """Times both decode requests of mixed lengths: as many seconds each as all others together."""
        return 2 if self.quick else 5
