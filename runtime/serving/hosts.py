"""AllowedHosts: by which names a server may be called.

A web page may let its own name point to an address of this machine (DNS rebinding), and then reads what a server there
answers. The browser still sends the page's name in the header Host, so names that nobody gave this server are refused.
An address in that header is no page's name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address
from typing import NamedTuple

LOCALHOST = "localhost"
HOST = re.compile(r"(?:\[(?P<ipv6>[^\[\]]*)\]|(?P<name>[^\[\]:]*))(?::[0-9]*)?")


class AllowedHosts(NamedTuple):
    """names: in lower case; "*" is any, "*.example.com" any below. any_address: also addresses that are not loopback.

    `localhost`, names below it and loopback addresses are always among them.
    """

    names: frozenset[str]
    any_address: bool

    @classmethod
    def of(cls, listening: str, names: Sequence[str], has_key: bool) -> AllowedHosts:
        """For a server that listens on `listening`. Without names, one that asks for a key takes any, because a page
        that does not know the key learns nothing."""
        local = is_loopback(listening)
        if not names and not local and has_key:
            names = ("*",)
        return cls(frozenset(name.lower().rstrip(".") for name in (*names, listening)), any_address=not local)

    def allow(self, header: str) -> bool:
        """header: what was sent as Host."""
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
    """Whether only this machine reaches it."""
    return host == LOCALHOST or (is_address(host) and ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
