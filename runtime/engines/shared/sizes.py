"""How many slots caches have for layers with a window, of which they hold no more than a window reaches."""

from __future__ import annotations

from ....plugins.native.packing import PANEL
from ..backends import describe_backend, slot_bytes
from ..base import EngineSpec
from ..cache import FIRST_CAPACITY

MOVED_TOKENS = 256  # after which the rows of a window move, in a cache of fixed size


def plan_slots(spec: EngineSpec, columns: int) -> int:
    """The slots of these layers in a plan whose passes see `columns` speculative rows. 0 where the layers have as many
    slots as the others, as in a plan for several sequences."""
    slots = (spec.model.variant.window or 0) + columns + MOVED_TOKENS
    return slots if spec.num_windowed_layers and spec.max_batch == 1 and slots < spec.capacity else 0


def near_slots(spec: EngineSpec, texts: int, retained: int = 0) -> int:
    """The most slots of these layers for so many texts, and for `retained` rows of ended ones. 0 where they have as
    many as the others. A growing cache has up to twice what it needs, and more where rejected rows have left gaps."""
    if spec.plan is not None:
        return texts * plan_slots(spec, spec.plan.columns)
    if not spec.num_windowed_layers or not describe_backend(spec.backend).panels:
        return 0
    of_text = (spec.model.variant.window or 0) + spec.max_width + 2 * PANEL  # panels that are not full
    return max(FIRST_CAPACITY, 3 * (texts * of_text + retained + spec.pass_widths[-1]))


def near_bytes(spec: EngineSpec, texts: int, retained: int = 0) -> int:
    """Their bytes."""
    return near_slots(spec, texts, retained) * slot_bytes(spec, spec.num_windowed_layers)


def far_slot_bytes(spec: EngineSpec) -> int:
    """Bytes of a slot of the layers that have one for each row."""
    return slot_bytes(spec, spec.model.num_layers - (spec.num_windowed_layers if near_slots(spec, 1) else 0))


def cache_bytes(spec: EngineSpec, slots: int, texts: int = 1) -> int:
    """The most bytes of so many slots of so many texts."""
    return min(slots * slot_bytes(spec), slots * far_slot_bytes(spec) + near_bytes(spec, texts))
