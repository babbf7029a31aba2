"""What a worker does about the garbage collector while it imports PyTorch and transformers.

They are most of its start, and leave 600,000 objects that live as long as it does. Looking for garbage among them while
they come takes a tenth of the time; looking through them later would stop everything for 0.4 s, once in a while.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect nothing while the block imports modules, and never look at what is there in the end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
