"""Fits the settings of speculation to the engines of a bundle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...models.bindings import ACCEPTANCE, DRAFT, TARGET
from ...models.errors import ConfigError, shown
from ..speculation.bounds import AUTO, LOOKUP_SIZES, WITHOUT_DRAFT, Lowerable
from ..speculation.config import SpeculativeConfig
from ..speculation.growers.kinds import LOOKUP
from .bundle import EngineBundle

LOOKUP_LEN = 15  # tokens that a prompt lookup proposes at most where nothing else is said


def fitted(speculative: SpeculativeConfig, bundle: EngineBundle) -> SpeculativeConfig:
    """The configuration for this bundle's engines: default limits are lowered to theirs, and without a draft "auto"
    becomes prompt lookup. Raises ConfigError for explicit settings beyond them, and for a draft's without one."""
    if not isinstance(speculative, SpeculativeConfig):
        fix = "write SpeculativeConfig(...), or None for plain decoding"
        raise ConfigError(f"speculative must be a SpeculativeConfig, not {shown(speculative)}: {fix}")
    if not bundle.has_draft:
        speculative = without_draft(speculative, bundle.manifest.engines[TARGET].max_width)
    for name in LOOKUP_SIZES if speculative.drafts else ():
        if getattr(speculative, name) != SpeculativeConfig.__dataclass_fields__[name].default:
            raise ConfigError(f"{name} is for grow={LOOKUP!r}, beside a draft it changes nothing: leave it out")
    if not speculative.shaped:
        speculative = replace(speculative, **lower_defaults(speculative, bundle))
    refuse_too_large(speculative, bundle)
    return speculative


def without_draft(speculative: SpeculativeConfig, max_width: int) -> SpeculativeConfig:
    """The configuration without a draft, for passes of up to `max_width` rows. Raises ConfigError if it needs one."""
    if not speculative.drafts:
        return speculative
    settings = {name: getattr(speculative, name) for name in WITHOUT_DRAFT}
    needing = [name for name, value in settings.items() if value not in WITHOUT_DRAFT[name]]
    if speculative.grow != AUTO or needing:
        name = needing[0] if speculative.grow == AUTO else "grow"
        raise ConfigError(
            f"{name}={getattr(speculative, name)!r} needs a draft, and this bundle was built with --draft none: use "
            f"grow={LOOKUP!r} (or leave {name} out), or build the bundle with a draft"
        )
    if speculative.lookup_ngram or not isinstance(speculative.lookup_len, Lowerable):
        return replace(speculative, grow=LOOKUP)
    length = max(1, min(LOOKUP_LEN, max_width - 1))
    return replace(speculative, grow=LOOKUP, lookup_len=length)


def lower_defaults(speculative: SpeculativeConfig, bundle: EngineBundle) -> dict[str, Any]:
    """The defaults to change: a target's pass must hold a proposal and its root, a draft's cache what it scores."""
    target = bundle.manifest.engines[TARGET]
    if not speculative.drafts:
        return lowered(speculative, {"lookup_len": target.max_width - 1})
    draft, tokens = bundle.manifest.engines[DRAFT], target.max_width - 1
    widths = lowered(speculative, {"frontier_width": draft.max_width, "max_total_draft_tokens": tokens})
    within, room = replace(speculative, **widths), draft_room(bundle)
    depth = max(1, min(tokens, speculative.max_draft_len))
    while depth > 1 and replace(within, max_draft_len=depth).max_draft_rows > room:
        depth -= 1
    return widths | lowered(speculative, {"max_draft_len": depth})


def lowered(speculative: SpeculativeConfig, limits: dict[str, int]) -> dict[str, Any]:
    """The settings that nobody wrote, within limits; at least 1."""
    return {
        name: int(max(1, min(limit, getattr(speculative, name))))
        for name, limit in limits.items()
        if isinstance(getattr(speculative, name), Lowerable)
    }


def refuse_too_large(speculative: SpeculativeConfig, bundle: EngineBundle) -> None:
    target = bundle.manifest.engines[TARGET]
    draft = bundle.manifest.engines[DRAFT] if speculative.drafts else None
    if draft is not None and speculative.needs_acceptance and ACCEPTANCE.name not in draft.outputs:
        raise ConfigError(
            "this bundle's draft has no acceptance head, which stop_rule='specdec++' and key='head' read: build the "
            "bundle with --acceptance-head (draftwood train-head makes one), or use stop_rule='confidence'"
        )
    if speculative.max_tokens + 1 > target.max_width:
        raise ConfigError(
            f"a proposal of {speculative.max_tokens} tokens and its root do not fit the target's widest pass of "
            f"{target.max_width} rows: propose fewer, or rebuild with larger --widths"
        )
    if draft is None:
        return
    if speculative.max_frontier > draft.max_width:
        raise ConfigError(
            f"{speculative.max_frontier} nodes do not fit the draft's widest pass of {draft.max_width} rows: "
            "lower frontier_width or branching, or rebuild with larger --widths"
        )
    room = draft_room(bundle)
    if speculative.max_draft_rows > room:
        raise ConfigError(
            f"a proposal scores up to {speculative.max_draft_rows} rows on the draft, whose cache has room for {room}: "
            "lower max_draft_len or frontier_width, or rebuild with larger --widths"
        )


def draft_room(bundle: EngineBundle) -> int:
    """The draft's cache slots for the nodes of one round, after a text of the greatest length."""
    draft = bundle.manifest.engines[DRAFT]
    return draft.capacity - bundle.manifest.max_length - draft.max_width
