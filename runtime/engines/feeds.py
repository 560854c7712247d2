"""Conversion of a batch into a graph's inputs, with an additive or compact mask, and of outputs into ForwardOutput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...models import bindings
from ...plugins.tree_attention.op import SequenceRow
from .base import ForwardOutput, TokenBatch


def feed(views: Mapping[str, NDArray[Any]], batch: TokenBatch, length: int, start: int) -> None:
    """Write a batch into the inputs of a pass. length: the committed rows before it. start: the slot of its first row.

    The input mask may have more columns than the batch's mask: the whole cache in the additive form, a few more in the
    compact form. No row attends to these columns."""
    if bindings.TREE_MASK.name in views:
        feed_sequences(views, batch, [SequenceRow(0, 0, length, length)], start)
        return
    feed_rows(views, batch, start)
    mask, end = views[bindings.ATTENTION_MASK.name][0, 0], length + batch.mask.shape[1]
    mask[:, :length] = 0.0
    mask[:, length:end] = np.where(batch.mask, np.float32(0.0), np.float32(bindings.MASKED))
    mask[:, end:] = bindings.MASKED


def feed_sequences(
    views: Mapping[str, NDArray[Any]], batch: TokenBatch, sequences: Sequence[SequenceRow], start: int
) -> None:
    """Write a batch with the rows of several sequences, in the sequences' order, into the inputs of a pass in the
    compact form. start: the slot of the first row. Padding rows count as rows of the last sequence."""
    feed_rows(views, batch, start)
    rows, seen = batch.mask.shape
    fields = views[bindings.SEQUENCES.name]
    fields[: len(sequences)] = sequences
    fields[len(sequences) :] = SequenceRow(rows, 0, 0, 0)  # unused sequences have no rows
    mask = views[bindings.TREE_MASK.name][0]
    mask[:, :seen] = batch.mask
    mask[:, seen:] = False


def feed_rows(views: Mapping[str, NDArray[Any]], batch: TokenBatch, start: int) -> None:
    """Write the inputs that both forms have."""
    views[bindings.INPUT_IDS.name][0] = batch.token_ids
    views[bindings.POSITION_IDS.name][0] = batch.position_ids
    views[bindings.WRITE_INDICES.name][0] = start
    views[bindings.OUTPUT_ROWS.name][:] = batch.output_rows
    if batch.states is not None:
        views[bindings.STATES_IN.name][0, : batch.num_tokens] = batch.states
        views[bindings.STATES_IN.name][0, batch.num_tokens :] = 0


def output_of(views: Mapping[str, NDArray[Any]]) -> ForwardOutput:
    """The outputs of a pass as a ForwardOutput of views, without the batch axis of size 1."""

    def result(name: str) -> NDArray[Any] | None:
        return views[name][0] if name in views else None

    ids, logprobs, acceptance, states = (
        result(item.name) for item in (bindings.TOP_IDS, bindings.TOP_LOGPROBS, bindings.ACCEPTANCE, bindings.STATES)
    )
    return ForwardOutput(views[bindings.LOGITS.name][0], ids, logprobs, acceptance, (), states)


def shown(output: ForwardOutput, batch: TokenBatch) -> ForwardOutput:
    """A pass's output with the states of the batch's rows, if they are read."""
    if output.states is None:
        return output
    return output._replace(states=output.states[: batch.num_tokens] if batch.states_read else None)
