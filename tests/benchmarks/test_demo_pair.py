"""The folders of the demo's pair hold the numbers of the files from which they were made."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from bundling import ROOT

from benchmarks.tools import demo_pair
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.models.layers import EMBEDDING_WEIGHT, HEAD_WEIGHT, network_of

DEMO = ROOT / "models" / "demo"


def test_a_target_keeps_its_numbers_and_tokens(tmp_path: Path) -> None:
    source = Checkpoint(DEMO / "target")
    demo_pair.write_target(source, tmp_path / "target")
    written = Checkpoint(tmp_path / "target")
    assert written.config == source.config and written.eos_token_ids() == source.eos_token_ids()
    for name in network_of(source.config).tensors():
        expected = source.tensor(name).astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(written.tensor(name).astype(np.float32), expected)


def test_a_full_draft_writes_what_the_trimmed_one_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The draft takes its target's place here: both have the same tokens."""
    trimmed = Checkpoint(DEMO / "smollm2")
    demo_pair.write_full_draft(trimmed, DEMO / "smollm2", "Leaves change their colour.\n" * 9, tmp_path / "full")
    full, kept = Checkpoint(tmp_path / "full"), trimmed.kept_tokens
    assert full.kept_tokens is None and kept is not None
    np.testing.assert_array_equal(full.tensor(EMBEDDING_WEIGHT), trimmed.tensor(EMBEDDING_WEIGHT))
    head = full.tensor(HEAD_WEIGHT)
    np.testing.assert_array_equal(head[kept], trimmed.tensor(HEAD_WEIGHT))
    others = np.delete(head, kept, axis=0)
    assert (others == others[0]).all() and not (head[kept] == others[0]).all(-1).any()
    assert float(capsys.readouterr().out.rpartition(": ")[2]) < 1e-6
