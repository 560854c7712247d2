"""How much memory there is, and which requests' caches fit into it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ....models.errors import ConfigError, DraftwoodError, RequestError
from ..base import EngineSpec

CACHE_SHARE = 0.4  # of the available memory: growing a cache copies it, and needs as much again meanwhile
RESERVE = 128 << 20  # bytes for everything else: texts, threads, answers
LONG_TEXT = 1 << 16  # characters; what shorter ones take lies within the reserve
BYTES_PER_BYTE = 256  # that the tokenizers library takes to encode a byte of text; it ends the process without them
M_ARENA_MAX = -8  # of malloc.h
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


class OutOfMemoryError(DraftwoodError):
    """There is too little memory for a request just now: come back later."""


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """The cache slots that requests may fill at a time. slots: all of them; None: without a limit. longest: slots of a
    request that fills the context. spare: slots for the speculative rows of one request. padding: slots beyond those of
    all requests, for the rows that the widest pass may be filled up with."""

    slots: int | None
    longest: int
    spare: int
    padding: int = 0

    @property
    def allocated(self) -> int | None:
        """Slots that a shared cache may grow to."""
        return None if self.slots is None else self.slots + self.padding

    def needed(self, prompt_tokens: int, max_tokens: int) -> int:
        """Slots that a request may come to fill. Raises RequestError for more than there ever are."""
        needed = min(prompt_tokens + max_tokens + self.spare, self.longest)
        if self.slots is not None and needed > self.slots:
            raise RequestError(
                f"a prompt of {prompt_tokens} tokens and {max_tokens} more may fill {needed} cache slots, and this "
                f"server has memory for {self.slots}: shorten the prompt, lower max_tokens, or start it with a larger "
                "--kv-cache-bytes"
            )
        return needed

    def tokens_behind(self, prompt_tokens: int) -> int:
        """The largest max_tokens that is not refused behind such a prompt; at least 1."""
        room = self.longest if self.slots is None else min(self.slots, self.longest)
        return max(1, room - self.spare - prompt_tokens)


def cache_budget(specs: Sequence[EngineSpec], kv_cache_bytes: int | None) -> CacheBudget:
    """What requests may fill of the caches of these engines, target first.

    kv_cache_bytes: for all caches; None takes CACHE_SHARE of what is available now. Raises ConfigError when that holds
    no request at all.
    """
    target = specs[0]
    longest, spare = target.capacity, target.max_width
    available = available_bytes()
    if kv_cache_bytes is None and available is None:
        return CacheBudget(None, longest, spare)
    if kv_cache_bytes is None:
        buffers = sum(map(buffer_bytes, specs))
        kv_cache_bytes = int(CACHE_SHARE * max(0, (available or 0) - RESERVE - buffers))
        padding = max(spec.pass_widths[-1] for spec in specs)
        slots = kv_cache_bytes // sum(slot_bytes(spec) + scratch_bytes(spec) for spec in specs) - padding
        if slots < 2 * spare:
            raise ConfigError(
                f"{available or 0} bytes of memory are available, too few for the caches of one request: free some, "
                "raise the limit of this process or container, or set --kv-cache-bytes"
            )
        return CacheBudget(slots, longest, spare, padding)
    return CacheBudget(kv_cache_bytes // sum(map(slot_bytes, specs)), longest, spare)


def slot_bytes(spec: EngineSpec) -> int:
    """Keys and values of one token, at four bytes per number: an upper bound."""
    model = spec.model
    return 4 * 2 * model.num_layers * model.num_kv_heads * model.head_dim


def scratch_bytes(spec: EngineSpec) -> int:
    """What passes hold for each slot: masks of every width, and the widest one's attention scores."""
    return 4 * (sum(spec.pass_widths) + 2 * spec.model.num_heads * spec.pass_widths[-1])


def buffer_bytes(spec: EngineSpec) -> int:
    """What passes hold whatever the caches have: logits for every number of rows, twice for those that sampling makes
    of them."""
    return 2 * 4 * spec.model.vocab_size * sum(spec.widths)


def limit_arenas() -> None:
    """Keep glibc from giving every thread 64 MiB of address space for what it allocates, where that is limited: a few
    threads take all of it without using it. Elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    import ctypes
    import resource

    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        with suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def check_text_memory(text: str) -> None:
    """Raises OutOfMemoryError for a text that takes more memory to encode than there is."""
    if len(text) <= LONG_TEXT:
        return
    needed, available = BYTES_PER_BYTE * len(text.encode("utf-8", "surrogatepass")), available_bytes()
    if available is not None and needed > available:
        raise OutOfMemoryError(
            f"to read a text of {len(text)} characters takes {needed >> 20} MiB of memory, and {available >> 20} are "
            "left: shorten it, or send it again later"
        )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory this process may still take: what the machine, its control groups and its own limits leave. None where
    the system does not say. root: of the file system that says it."""
    return min(read_limits(root), default=None)


def read_limits(root: Path) -> Iterator[int]:
    """Every limit that is known, in bytes that are left."""
    for line in read_lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
    for line in read_lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if controllers == "" and number == "0":
            yield from read_group_limits(mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from read_group_limits(mount / "memory", path, *names)
    if sys.platform != "win32":
        import resource

        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
        sizes = [line.split()[0] for line in read_lines(root / "proc/self/statm")]
        if soft != resource.RLIM_INFINITY and sizes:
            yield max(0, soft - int(sizes[0]) * resource.getpagesize())


def read_group_limits(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """What a control group and those around it leave. Inside of a container only the mount itself can be seen."""
    inner = mount / path.lstrip("/")
    for folder in (inner, *(parent for parent in inner.parents if parent.is_relative_to(mount))):
        with suppress(ValueError, IndexError):  # "max", or a file that is not there
            most, used = int(read_lines(folder / limit)[0]), int(read_lines(folder / usage)[0])
            cached = [
                line.split()[1] for line in read_lines(folder / "memory.stat") if line.startswith(f"{reclaimable} ")
            ]
            if most < UNLIMITED:
                yield max(0, most - used + int(cached[0] if cached else 0))


def read_lines(file: Path) -> list[str]:
    """Of a file of the system; none where there is no such file."""
    try:
        return file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
