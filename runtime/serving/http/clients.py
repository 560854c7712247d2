"""The client of a request: the name of its API key, or the address of the sender."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from hashlib import sha256
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import NamedTuple

from ....models.errors import ConfigError

KEY = re.compile(r"[!-~]+")  # characters that a header transmits unchanged
KEY_RULE = "a key is one or more visible ASCII characters"
IPV6_NETWORK = 64  # bits of the prefix that a provider gives to one customer, who may use every address below
MAX_ADDRESS = 64  # characters; a proxy may send any text


class ApiKey(NamedTuple):
    """A key that opens the server."""

    name: str  # of its owner, who may have several
    digest: bytes  # of the key, so that all have one length

    @classmethod
    def of(cls, name: str, key: str, source: str) -> ApiKey:
        """source: origin of the key, for the error message. Raises ConfigError if `key` cannot be a key."""
        if not KEY.fullmatch(key):
            what = "is empty" if not key else "holds other characters"
            raise ConfigError(f"the API key of {source} {what}: {KEY_RULE}; leave it out for a server without a key")
        return cls(name, sha256(key.encode()).digest())


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file. A line has a name, spaces and a key; lines that begin with # are comments.

    Raises ConfigError for a file without keys, other lines, and a key that appears twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys of {path} ({error}): name a text file") from error
    keys: dict[bytes, ApiKey] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        source = f"{path}, line {number},"
        if len(words) != 2:
            raise ConfigError(f"{source} is no API key: write a name, a space and a key")
        key = ApiKey.of(words[0], words[1], source)
        if keys.setdefault(key.digest, key).name != key.name:
            raise ConfigError(f"{source} repeats the key of {keys[key.digest].name!r}: give each name a key of its own")
    if not keys:
        raise ConfigError(f"{path} has no API keys: write lines of a name, a space and a key")
    return list(keys.values())


def owner_of(keys: Sequence[ApiKey], authorization: str) -> str | None:
    """The name of the key in the header Authorization; None for a wrong key. The comparison takes constant time."""
    scheme, _, given = authorization.partition(" ")
    digest, owner = sha256(given.encode()).digest(), None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            owner = key.name
    return owner if scheme.lower() == "bearer" else None


def network_of(address: str) -> str:
    """The addresses of one client: an IPv4 address, or an IPv6 network. Any other text is returned as it is."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address[:MAX_ADDRESS]
    if isinstance(parsed, IPv6Address):
        if parsed.ipv4_mapped:
            return str(parsed.ipv4_mapped)
        return str(ip_network((int(parsed), IPV6_NETWORK), strict=False))
    return str(parsed)
