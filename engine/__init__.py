"""Running a transformers model for serving: load it, cache its keys and values, step it, sample from it.

Shared by the target and the draft service. Knows nothing about routers, tries or scheduling.
"""

import logging
import os

# transformers imports torchao, which then warns of kernels for GPUs that a CPU build of torch cannot load, and of
# what it will have to change for later versions of torch.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)

# Read when oneDNN and PyTorch's layer above it are first used. Each keeps up to 1,024 kernels, one for every shape that
# a product ever had: hundreds of MiB for a small model under mixed load (docs/engine.md).
KERNELS_KEPT = "256"
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, KERNELS_KEPT)

# Read when CUDA starts. Workspaces so small that cuBLAS splits no sum: else a row's bits depend on how many there are.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
