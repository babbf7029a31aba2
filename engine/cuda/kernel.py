"""Attention over pages by torch's varlen kernel, if it computes right here.

What the kernel takes differs between versions of torch, and some compute silently wrong when they split the keys of a
sequence (pytorch issue 194167). So the variants are tried on random pages, and the first one that is right is used.
Decides which variant that is, and which layers it can compute; nothing about what is in the pages.

Keys are not split, if that variant is right: a query's result then has the same bits whatever else is in the batch.
The last variant leaves splitting to torch, and that promise with it.

Tensor legend: T tokens, Q query heads, H key/value heads, S slots, G pages, B slots of a page, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.cuda.pages import Chain, Pages
from engine.kv_store import PAGE

log = logging.getLogger(__name__)

HALF = frozenset({torch.float16, torch.bfloat16})

HEAD_STEP, LARGEST_HEAD = 8, 256
"""Head sizes the kernel takes as they are; others it would pad, copying the whole cache."""

TOLERANCE = 0.05
"""Largest accepted error in the trial, whose results are of size 1."""


@dataclass(frozen=True, slots=True)
class PagedKernel:
    """``torch.nn.attention.varlen.varlen_attn``, or what stands in for it, with what this version wants."""

    attend: Callable[..., Any]
    num_splits: int | None = 1
    key_starts: bool = True
    """Whether it wants to be told where keys start, which means nothing for pages."""
    page: int = PAGE
    """A page has a multiple of so many slots."""
    dtypes: frozenset[torch.dtype] = HALF

    def takes(self, query_1QTD: Tensor, keys_SHD: Tensor, values_SHE: Tensor) -> bool:
        """Whether it computes attention of these dtypes and sizes."""
        size = query_1QTD.shape[-1]
        return (
            {query_1QTD.dtype, keys_SHD.dtype, values_SHE.dtype} <= self.dtypes
            and size == keys_SHD.shape[-1] == values_SHE.shape[-1]
            and size % HEAD_STEP == 0
            and size <= LARGEST_HEAD
        )

    def __call__(
        self,
        query_TQD: Tensor,
        keys_SHD: Tensor,
        values_SHD: Tensor,
        pages: Pages,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """Causal attention of the queries of ``pages``, ``[T, Q, D]``, each ``window`` positions back, itself included.

        The queries of a sequence are at its end.
        """
        found_TQD: Tensor = self.attend(
            query_TQD,
            keys_SHD.view(-1, pages.page, *keys_SHD.shape[1:]),
            values_SHD.view(-1, pages.page, *values_SHD.shape[1:]),
            pages.starts_N1,
            pages.key_starts_N1 if self.key_starts else None,
            pages.most_queries,
            pages.most_keys,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=True,
            seqused_k=pages.keys_N,
            block_table=pages.table_NW,
            num_splits=self.num_splits,
        )
        return found_TQD


def find_kernel(dtype: torch.dtype, device: torch.device) -> PagedKernel | None:
    """The paged kernel for this device; None if there is none that computes right, which is logged."""
    if device.type != "cuda" or dtype not in HALF:
        return None
    # Imported here because it brings in the compiler, which costs a worker on a CPU memory for nothing.
    from torch.nn.attention.varlen import varlen_attn

    return first_right(
        [
            PagedKernel(varlen_attn),
            PagedKernel(varlen_attn, key_starts=False),
            PagedKernel(varlen_attn, num_splits=None),
        ],
        dtype,
        device,
    )


def first_right(kernels: list[PagedKernel], dtype: torch.dtype, device: torch.device) -> PagedKernel | None:
    """The first that computes right; None if none does, which is logged."""
    reasons = []
    for kernel in kernels:
        try:
            error = _trial_error(kernel, dtype, device)
        except Exception as refusal:  # whatever this version does not take
            reasons.append(first_line(refusal))
            continue
        if error <= TOLERANCE:  # not if it is NaN
            return kernel
        reasons.append(f"it is off by {error:.2g}")
    log.warning("attention is not computed over pages: torch's kernel was tried, and %s", "; then ".join(reasons))
    return None


def first_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    line = next(iter(str(error).strip().splitlines()), "no reason given")
    return f"{type(error).__name__}: {line}"


@torch.inference_mode()
def _trial_error(kernel: PagedKernel, dtype: torch.dtype, device: torch.device) -> float:
    """The largest difference between the kernel and the plain computation, over steps of every kind."""
    heads, group, size = 2, 4, 64
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    keys_SHD, values_SHD = random(12 * kernel.page, heads, size), random(12 * kernel.page, heads, size)
    worst = 0.0
    for chains in _trial_steps(kernel.page):
        pages = Pages.of(chains, kernel.page, device)
        # Large queries make every one look at few keys, so that no result is small.
        query_TQD = 4 * random(sum(chain.queries for chain in chains), heads * group, size)
        for window in (None, kernel.page + 3):
            found_TQD = kernel(query_TQD, keys_SHD, values_SHD, pages, None, window)
            expected_TQD = plain_attention(query_TQD, keys_SHD, values_SHD, chains, kernel.page, window)
            error = (found_TQD.float() - expected_TQD).abs().max()
            worst = float(torch.maximum(error, error.new_tensor(worst)))  # NaN stays NaN
    return worst


def _trial_steps(page: int) -> Iterator[list[Chain]]:
    """Long and short contexts in scattered pages: decoded, verified, prefilled, and mixed."""
    lengths_and_pages = [(5 * page - 3, (7, 2, 11, 0, 5)), (3, (4,)), (2 * page, (9, 1)), (page + 1, (3, 8))]
    for counts in ((1, 1, 1, 1), (6, 3, 6, 6), (1, 2, page + 5, page // 4), (1,)):
        yield [Chain(count, keys, pages) for count, (keys, pages) in zip(counts, lengths_and_pages, strict=False)]


def plain_attention(
    query_TQD: Tensor,
    keys_SHD: Tensor,
    values_SHD: Tensor,
    chains: list[Chain],
    page: int,
    window: int | None,
) -> Tensor:
    """What a :class:`PagedKernel` has to compute, sequence by sequence in float32."""
    outputs, start = [], 0
    for chain in chains:
        slots_GB = torch.tensor(chain.pages)[:, None] * page + torch.arange(page)
        slots_K = slots_GB.view(-1)[: chain.keys].to(keys_SHD.device)
        behind_TK = torch.arange(chain.keys - chain.queries, chain.keys)[:, None] - torch.arange(chain.keys)
        seen_TK = (behind_TK >= 0) & (behind_TK < (window or chain.keys))
        out_1QTD = scaled_dot_product_attention(
            query_TQD[start : start + chain.queries].float().transpose(0, 1)[None],
            keys_SHD[slots_K].float().transpose(0, 1)[None],
            values_SHD[slots_K].float().transpose(0, 1)[None],
            attn_mask=seen_TK.to(keys_SHD.device),
            enable_gqa=True,
        )
        outputs.append(out_1QTD[0].transpose(0, 1))
        start += chain.queries
    return torch.cat(outputs)
