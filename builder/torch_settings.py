"""How torch computes here: threads, subnormal numbers, and whether products in bf16 are fast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ..plugins.native.processor import available

HALF_PRODUCTS = ("avx512_bf16", "amx_bf16")


def is_half_fast(device: torch.device) -> bool:
    """Whether matrix products in bf16 are faster: on a GPU, and on a CPU with instructions for them."""
    return device.type == "cuda" or not available(()).isdisjoint(HALF_PRODUCTS)


@contextmanager
def torch_settings(threads: int) -> Iterator[None]:
    """Use so many threads of torch inside the block; 0: torch's own choice. Subnormal numbers count as 0 there: on a
    CPU, gradients with such numbers take several times as long."""
    before = torch.get_num_threads()
    for kind in (np.float16, np.float32, np.float64):
        np.finfo(kind)  # numpy looks for subnormal numbers once, and warns where there are none
    torch.set_flush_denormal(True)
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)
