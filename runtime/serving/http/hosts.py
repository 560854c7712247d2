"""AllowedHosts: the host names under which clients may call a server.

A hostile web page may let its own host name point to an address of this machine (DNS rebinding), and then read the
answers of a server there. The browser still sends the page's name in the header Host. Therefore names that are not
configured for this server are refused. An address in this header is never the name of a page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address
from typing import NamedTuple

LOCALHOST = "localhost"
HOST = re.compile(r"(?:\[(?P<ipv6>[^\[\]]*)\]|(?P<name>[^\[\]:]*))(?::[0-9]*)?")


class AllowedHosts(NamedTuple):
    """`localhost`, names below it and loopback addresses are always allowed."""

    names: frozenset[str]  # in lower case; "*" allows any name, "*.example.com" any name below
    any_address: bool  # whether addresses other than loopback addresses are allowed, too

    @classmethod
    def of(cls, listening: str, names: Sequence[str], has_key: bool) -> AllowedHosts:
        """The hosts of a server that listens on `listening`. Without `names`, a server with API keys allows any name,
        because a page that does not know the key gets no answers."""
        local = is_loopback(listening)
        if not names and not local and has_key:
            names = ("*",)
        return cls(frozenset(name.lower().rstrip(".") for name in (*names, listening)), any_address=not local)

    def allow(self, header: str) -> bool:
        """Whether a request with this header Host is allowed."""
        if "*" in self.names:
            return True
        match = HOST.fullmatch(header.strip())
        if match is None:
            return False
        name = (match["ipv6"] or match["name"] or "").lower().rstrip(".")
        if is_loopback(name) or name.endswith(f".{LOCALHOST}") or name in self.names:
            return True
        if is_address(name):
            return self.any_address
        parents = [name[at:] for at, letter in enumerate(name) if letter == "."]
        return any(f"*{parent}" in self.names for parent in parents)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    return host == LOCALHOST or (is_address(host) and ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
