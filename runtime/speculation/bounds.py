"""Bounds on the type and size of each setting of SpeculativeConfig.

They are checked before anything is computed from a setting: settings may be hostile, and the size of some shapes is
exponential in a setting."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from ...models.errors import ConfigError, shown

MAX_PROPOSAL = 1024  # tokens or rows; no engine takes more
AUTO = "auto"
MERGERS = ("none", "gsd")
KEYS = ("draft", "calibrated", "head")
BUDGETS = ("cost", "fixed")
LOOKUPS = (AUTO, "off")
STOPPERS = ("fixed", "specdec++", "confidence", "entropy")
WITHOUT_DRAFT = {  # settings that say how a draft proposes, and their values where there is none
    "merge": ("none",),
    "stop_rule": ("fixed",),
    "key": ("draft", "calibrated"),
    "verify": ("auto", "match"),
}
LOOKUP_SIZES = ("lookup_ngram", "lookup_len")
ONLY_WITH = {  # settings that another one must ask for: without it they change nothing
    "branching": ("grow", ("k-ary",)),
    "topology": ("grow", ("static",)),
    "draft_threshold": ("grow", ("dyspec-threshold",)),
    "merge_ngram": ("merge", ("gsd",)),
    "rejection_threshold": ("stop_rule", ("specdec++",)),
    "min_draft_len": ("stop_rule", ("specdec++",)),
    "confidence_threshold": ("stop_rule", ("confidence",)),
    "entropy_threshold": ("stop_rule", ("entropy",)),
    **dict.fromkeys(LOOKUP_SIZES, ("grow", ("lookup", AUTO))),  # "auto" is "lookup" without a draft
}
NAMED: dict[str, dict[str, str]] = {  # names of papers in the place of a grower, and the settings that they stand for
    "gsd": {"grow": AUTO, "merge": "gsd"},
    "specdec++": {"grow": "chain", "stop_rule": "specdec++"},
    "ngram": {"grow": "lookup"},  # vLLM's name
}
MAX_NGRAM = 16  # tokens; a prompt lookup stores one n-gram per token of the text
# Name -> the least and the largest value.
INTEGERS = {
    "max_draft_len": (1, MAX_PROPOSAL),
    "max_total_draft_tokens": (1, MAX_PROPOSAL),
    "frontier_width": (1, MAX_PROPOSAL),
    "min_draft_len": (0, MAX_PROPOSAL),
    "merge_ngram": (1, MAX_NGRAM),
    "lookup_ngram": (0, MAX_NGRAM),
    "lookup_len": (1, MAX_PROPOSAL),
}
SHARES = ("sibling_share", "leaf_share", "rejection_threshold", "confidence_threshold", "entropy_threshold")
NUMBERS = (*SHARES, "draft_threshold")


class Lowerable(int):
    """A default that is lowered to the capacity of a bundle, see `bundle/fit.py`. A number that a user wrote is another
    type, also where it is equal, and is refused where the bundle has no room for it."""

    __slots__ = ()


def check_bounds(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for a setting of the wrong type, or of a size that no engine takes.

    settings: fields of SpeculativeConfig by name. Every field that is neither a number nor a shape must be text;
    SpeculativeConfig checks the text itself.
    """
    for name, value in settings.items():
        if name in INTEGERS:
            if not is_integer(value):
                raise ConfigError(f"{name} must be a whole number, not {shown(value)}")
            least, most = INTEGERS[name]
            if not least <= value <= most:
                raise ConfigError(f"{name} must be at least {least} and not more than {most}, but is {shown(value)}")
        elif name in NUMBERS:
            if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
                raise ConfigError(f"{name} must be a number, not {shown(value)}")
        elif name in ("branching", "topology"):
            check_shape(name, value)
            if name == "branching" and len(value) and not fits(value):
                raise ConfigError(f"branching makes more than {MAX_PROPOSAL} tokens: no engine takes that many")
        elif not isinstance(value, str):
            raise ConfigError(f"{name} must be text, not {shown(value)}")


def check_effects(config: Any) -> None:
    """Raises ConfigError for a setting, other than its default, that changes nothing beside the other settings."""
    for name, off in {} if config.drafts else WITHOUT_DRAFT.items():
        if getattr(config, name) not in off:
            raise ConfigError(f"{name}={getattr(config, name)!r} is for a draft's proposals: leave it out")
    for name, (other, values) in ONLY_WITH.items():
        chosen = getattr(config, other)
        if getattr(config, name) != type(config).__dataclass_fields__[name].default and chosen not in values:
            raise ConfigError(
                f"{name} changes nothing with {other}={chosen!r}: leave it out, or use {other}={values[0]!r}"
            )


def check_shape(name: str, shape: Any) -> None:
    """Raises ConfigError if `shape` is no list of whole numbers, or if its length or an item is out of bounds."""
    if not isinstance(shape, (list, tuple)):
        raise ConfigError(f"{name} must be a list of whole numbers, not {shown(shape)}")
    if len(shape) > MAX_PROPOSAL:
        raise ConfigError(f"{name} has {len(shape)} items, more than {MAX_PROPOSAL}: no engine takes that many")
    for item in shape:
        if not is_integer(item):
            raise ConfigError(f"{name} must be a list of whole numbers, not one with {shown(item)}")
        if not 0 <= item <= MAX_PROPOSAL:
            raise ConfigError(f"{name} must hold numbers from 0 and not more than {MAX_PROPOSAL}, not {shown(item)}")


def is_integer(value: object) -> bool:
    """Whether a value is an integer of Python or of a library such as numpy; True and False are not integers."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def fits(branching: list[int] | tuple[int, ...]) -> bool:
    """Whether the k-ary tree with `branching[d]` children per node at depth d has at most MAX_PROPOSAL tokens."""
    layer, total = 1, 0
    for children in branching:
        layer *= children
        total += layer
        if total > MAX_PROPOSAL:
            return False
    return True
