"""The available memory, and the number of cache slots that fit into it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ....models.errors import DraftwoodError, NoRoomError, RequestError
from ..backends import CPU, slot_bytes
from ..base import Engine, EngineSpec
from ..gpus import free_bytes
from ..limits import available_bytes
from .pool import PooledEngine
from .sizes import far_slot_bytes, near_bytes

CACHE_SHARE = 0.4  # share of the available memory for caches: a growing cache is copied, so it needs its size twice
RESERVE = 128 << 20  # bytes for texts, threads and answers
LONG_TEXT = 1 << 16  # characters; the reserve covers the encoding of shorter texts
# Bytes of memory that the tokenizers library takes per byte of text. It ends the process when an allocation fails.
BYTES_PER_BYTE = 256
M_ARENA_MAX = -8  # a parameter of mallopt, from malloc.h


class OutOfMemoryError(DraftwoodError):
    """There is too little memory for a request at present. The client may retry later."""


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """The cache slots that requests may use at a time. slots: for all requests together; None: without a limit.
    longest: slots of a request that fills the context. spare: slots for the speculative rows of one request. padding:
    additional slots for the padding rows of the widest pass."""

    slots: int | None
    longest: int
    spare: int
    padding: int = 0

    @property
    def allocated(self) -> int | None:
        """The number of slots to which a shared cache may grow; None: without a limit."""
        return None if self.slots is None else self.slots + self.padding

    def needed(self, prompt_tokens: int, max_tokens: int) -> int:
        """The most slots that a request can need. Raises RequestError when they exceed the budget."""
        needed = min(prompt_tokens + max_tokens + self.spare, self.longest)
        if self.slots is not None and needed > self.slots:
            raise RequestError(
                f"a prompt of {prompt_tokens} tokens and {max_tokens} more may fill {needed} cache slots, and this "
                f"server has memory for {self.slots}: shorten the prompt, lower max_tokens, or start it with a larger "
                "--kv-cache-bytes"
            )
        return needed

    def tokens_after(self, prompt_tokens: int) -> int:
        """The largest max_tokens that `needed` accepts for a prompt of this length; at least 1."""
        room = self.longest if self.slots is None else min(self.slots, self.longest)
        return max(1, room - self.spare - prompt_tokens)


def cache_budget(
    specs: Sequence[EngineSpec], kv_cache_bytes: int | None, provider: str = CPU, texts: int = 1, retained: int = 0
) -> CacheBudget:
    """The budget for the caches of these engines, target first.

    kv_cache_bytes: memory for all caches; None takes CACHE_SHARE of the memory that is available now. provider: of the
    engines; caches of another one than the CPU's lie in the memory of the first GPU. texts: that run at a time.
    retained: rows of ended ones that are kept. Raises NoRoomError when this share suffices for no request and when more
    memory is asked for than is available, and EngineError without a GPU.
    """
    target = specs[0]
    longest, spare = target.capacity, target.max_width
    on_gpu = provider != CPU and kv_cache_bytes is None
    available = free_bytes() if on_gpu else available_bytes()
    if kv_cache_bytes is None and available is None:
        return CacheBudget(None, longest, spare)
    if kv_cache_bytes is None:
        buffers = sum(map(buffer_bytes, specs))
        kv_cache_bytes = int(CACHE_SHARE * max(0, (available or 0) - RESERVE - buffers))
        padding = max(spec.pass_widths[-1] for spec in specs)
        slots = slots_within(specs, kv_cache_bytes, texts, retained, sum(map(scratch_bytes, specs))) - padding
        if slots < 2 * spare:
            raise NoRoomError(
                f"{available or 0} bytes of memory are available{' on the GPU' if on_gpu else ''}, too few for the "
                "caches of one request: free some, raise the limit of this process or container, or set "
                "--kv-cache-bytes"
            )
        return CacheBudget(slots, longest, spare, padding)
    if provider == CPU and available is not None and kv_cache_bytes > available:
        raise NoRoomError(
            f"--kv-cache-bytes of {kv_cache_bytes} is more than the {available} bytes of memory that are available: "
            "lower it, or leave it out to take a share of these"
        )
    return CacheBudget(slots_within(specs, kv_cache_bytes, texts, retained), longest, spare)


def slots_within(specs: Sequence[EngineSpec], size: int, texts: int, retained: int, beside: int = 0) -> int:
    """The slots that fit so many bytes, at least; beside: bytes for each slot that are in no cache."""
    near, far = sum(near_bytes(spec, texts, retained) for spec in specs), sum(map(far_slot_bytes, specs))
    return max(size // (sum(map(slot_bytes, specs)) + beside), (size - near) // max(1, far + beside))


def pools_over(engines: Sequence[Engine], texts: int, slots: int | None, prefixes: int) -> list[PooledEngine]:
    """A pool over each of these engines, for so many texts. slots: the most of a pool; None: as many as full texts
    take. prefixes: see PooledEngine.share_prefixes; 0: texts share no rows."""
    pools = []
    for engine in engines:
        full = texts * engine.spec.capacity
        pools.append(PooledEngine(engine, full if slots is None else min(full, slots)))
        if prefixes:
            pools[-1].share_prefixes(prefixes)
    return pools


def scratch_bytes(spec: EngineSpec) -> int:
    """The bytes that passes need per slot: masks of every width, and the attention scores of the widest pass."""
    return 4 * (sum(spec.pass_widths) + 2 * spec.model.num_heads * spec.pass_widths[-1])


def buffer_bytes(spec: EngineSpec) -> int:
    """The bytes of any passes: states, and logits of every width, twice, because sampling makes a copy of them."""
    states = (spec.model.state_size + spec.model.state_inputs) * sum(spec.pass_widths)
    return 4 * (2 * spec.model.num_logits * sum(spec.widths) + states)


def limit_arenas() -> None:
    """Make glibc use one memory arena for all threads where the process's address space is limited. Each arena reserves
    64 MiB of address space, so a few threads would exhaust the limit. Does nothing on other systems."""
    if sys.platform != "linux":
        return
    import ctypes
    import resource

    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        with suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def check_text_memory(text: str) -> None:
    """Raises OutOfMemoryError when the encoding of a text needs more memory than is available."""
    if len(text) <= LONG_TEXT:
        return
    needed, available = BYTES_PER_BYTE * len(text.encode("utf-8", "surrogatepass")), available_bytes()
    if available is not None and needed > available:
        raise OutOfMemoryError(
            f"to read a text of {len(text)} characters takes {needed >> 20} MiB of memory, and {available >> 20} are "
            "left: shorten it, or send it again later"
        )
