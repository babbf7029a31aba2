"""An EAGLE-3 head (Li et al. 2025, arXiv:2503.01840) as plain torch: it guesses tokens from a target's hidden states.

``fuse`` makes one state of a token's auxiliary hidden states. A row of ``forward`` is the state of the token at
position p with the *embedding of the token after it*, at p + 1; its position is p, and it guesses the token at p + 2.
To guess on, the row's own next state takes the place of a fused one, with the embedding of the guess, at p + 1.

The first layer normalises both, reads them side by side, and adds to the state alone; further layers are Llama's. What
is cached, and who attends to what, is for the caller: ``attend`` gets queries, keys and values after rotation.

Tensor legend: N rows, D hidden size, A auxiliary states times the target's hidden size, Q heads, K key/value heads,
E head size, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from engine.eagle.config import EagleConfig
from engine.layers.layer_ops import rotated

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Of (layer, q ``[N, Q, E]``, k and v ``[N, K, E]``): what the rows read, ``[N, Q, E]``. Scale: E ** -0.5."""


class HeadNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x_ND: Tensor) -> Tensor:
        """``[..., D] -> [..., D]``."""
        normed = rms_norm(x_ND.float(), (x_ND.shape[-1],), eps=self.variance_epsilon)
        return self.weight * normed.to(x_ND.dtype)


class HeadAttention(nn.Module):
    """Projections and rotation; which rows attend to which is the caller's."""

    def __init__(self, config: EagleConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.scaling = layer, config.head_dim, config.head_dim**-0.5
        inputs = config.hidden_size * (2 if layer == 0 else 1)
        bias, queries, keys = config.attention_bias, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(inputs, queries * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(inputs, keys * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(inputs, keys * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(queries * config.head_dim, config.hidden_size, bias=bias)

    def forward(self, x_ND: Tensor, cos_NE: Tensor, sin_NE: Tensor, attend: Attend) -> Tensor:
        """What the rows read, ``[N, D]``."""
        q_NQE, k_NKE, v_NKE = (
            linear(x_ND).unflatten(-1, (-1, self.head_dim)) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        read_NQE = attend(self.layer, rotated(q_NQE, cos_NE, sin_NE), rotated(k_NKE, cos_NE, sin_NE), v_NKE)
        out_ND: Tensor = self.o_proj(read_NQE.flatten(-2))
        return out_ND


class HeadLayer(nn.Module):
    """One layer of a head; the first reads embeddings as well."""

    def __init__(self, config: EagleConfig, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = HeadNorm(size, eps)
        self.hidden_norm = HeadNorm(size, eps) if layer == 0 else None
        self.post_attention_layernorm = HeadNorm(size, eps)
        self.self_attn = HeadAttention(config, layer)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]
        self._residual_normed = config.norm_before_residual

    def forward(self, embeddings_ND: Tensor, x_ND: Tensor, cos_NE: Tensor, sin_NE: Tensor, attend: Attend) -> Tensor:
        """The residual stream behind the layer, ``[N, D]``."""
        if self.hidden_norm is None:
            read = self.input_layernorm(x_ND)
        else:
            normed_ND = self.hidden_norm(x_ND)
            read = torch.cat((self.input_layernorm(embeddings_ND), normed_ND), -1)
            x_ND = normed_ND if self._residual_normed else x_ND
        x_ND = x_ND + self.self_attn(read, cos_NE, sin_NE, attend)
        out_ND: Tensor = x_ND + self.mlp(self.post_attention_layernorm(x_ND))
        return out_ND


class EagleHead(nn.Module):
    """The head. Its embedding and output layer may be the target's: :mod:`engine.eagle.loading` puts them in."""

    target_ids: Tensor
    """``[V]`` int64: the target's id of each token the head can say."""
    fingerprint = 0
    """What both ends know it by where it drafts on a worker of its own; 0: it does not."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        read = config.aux_states * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.input_norm = HeadNorm(read, eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(HeadNorm(config.target_hidden_size, eps) for _ in range(config.aux_states))
            if config.fc_norm
            else None
        )
        self.fc = nn.Linear(read, size, bias=False)
        self.layers = nn.ModuleList(HeadLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = HeadNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("target_ids", torch.arange(config.draft_vocab_size), persistent=False)
        self.rotary_emb = LlamaRotaryEmbedding(config.llama())

    def embed(self, tokens_N: Tensor) -> Tensor:
        """Embeddings of the target's tokens, ``[N, D]``."""
        rows_ND: Tensor = self.embed_tokens(tokens_N)
        return rows_ND

    def fuse(self, aux_NA: Tensor) -> Tensor:
        """One state of each token's auxiliary hidden states, which stand side by side: ``[N, A] -> [N, D]``."""
        if self.input_norm is not None:
            aux_NA = self.input_norm(aux_NA)
        if self.fc_norm is not None:
            parts = aux_NA.chunk(len(self.fc_norm), -1)
            aux_NA = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        states_ND: Tensor = self.fc(aux_NA)
        return states_ND

    def forward(
        self, embeddings_ND: Tensor, states_ND: Tensor, positions_N: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Next states, to guess on from, and normed ones, which :meth:`logits` reads; both ``[N, D]``.

        ``embeddings_ND``: of the token after the one that the state in the same row belongs to; ``positions_N``: of
        that one. Rows may also be ``[B, N, D]`` with positions ``[B, N]``; ``attend`` gets the same leading sizes.
        """
        cos_NE, sin_NE = self.rotation(positions_N, states_ND)
        x_ND = states_ND
        for layer in self.layers:
            x_ND = layer(embeddings_ND, x_ND, cos_NE, sin_NE, attend)
        normed_ND: Tensor = self.norm(x_ND)
        return (normed_ND if self.config.norm_output else x_ND), normed_ND

    def logits(self, normed_ND: Tensor) -> Tensor:
        """What the head says of the next token, ``[N, V]``; column i stands for the target's ``target_ids[i]``."""
        logits_NV: Tensor = self.lm_head(normed_ND)
        return logits_NV

    def by_token(self, logits_NV: Tensor) -> Tensor:
        """The same by the target's tokens, ``[N, vocab_size]``: -inf of those that it cannot say."""
        spread = logits_NV.new_full((len(logits_NV), self.config.vocab_size), float("-inf"))
        return spread.index_copy_(1, self.target_ids, logits_NV)

    def rotation(self, positions_N: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, ``[..., 1, E]`` each, in the format of ``like``."""
        rows = positions_N.reshape(1, -1)
        cos_1NE, sin_1NE = self.rotary_emb(like, rows)
        shape = (*positions_N.shape, 1, cos_1NE.shape[-1])
        return cos_1NE.reshape(shape), sin_1NE.reshape(shape)
