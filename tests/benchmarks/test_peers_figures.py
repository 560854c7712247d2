"""The comparison's arithmetic: medians, ratios in equal groups, equal texts, and how rows are shown."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.figures import (
    MethodKey,
    MethodRun,
    count_tokens_per_pass,
    make_row,
    measure_acceptance,
    median_speed_ratio,
    share_of_same_texts,
    summarise,
)
from benchmarks.peers.protocol import PLAIN, Generation
from benchmarks.peers.report import read_rows, to_markdown
from benchmarks.tools.record import rows_to_json


def generation(seconds: float, tokens: tuple[int, ...] = (1, 2), **counters: float) -> Generation:
    return Generation([list(tokens)], seconds, counters)


def runs_of(*seconds: float, tokens: tuple[int, ...] = (1, 2)) -> list[MethodRun]:
    return [MethodRun(0, repeat, generation(each, tokens), 0.0) for repeat, each in enumerate(seconds)]


def test_medians_quartiles_and_ratios() -> None:
    """The fastest method of another peer at the same precision and setting is what a row is compared with."""
    plain, fast, other = (
        MethodKey("fp32", "draftwood", PLAIN),
        MethodKey("fp32", "draftwood", "topk:7"),
        MethodKey("fp32", "llama.cpp", PLAIN),
    )
    runs = {plain: runs_of(0.2, 0.4, 0.8), fast: runs_of(0.1, 0.1, 0.4), other: runs_of(0.1, 0.3, 0.2)}
    row = make_row(fast, runs, runs[plain])
    assert row.tokens_per_second == pytest.approx(20) and (row.low, row.high) == pytest.approx((12.5, 20))
    assert row.of_plain == pytest.approx(2) and row.of_best == pytest.approx(1)
    assert (row.same_as_plain, row.same_as_first, row.tokens_per_pass) == (1, 1, None)
    elsewhere = {
        other._replace(method="draft:3"): runs_of(0.05, 0.15, 0.1),
        other._replace(precision="int8"): runs_of(1),
    }
    rows = summarise(runs | elsewhere)
    assert [row.of_best for row in rows] == pytest.approx([0.25, 0.5, 0.5, 1, 1])
    with pytest.raises(ValueError, match="llama"):
        summarise({other: runs_of(0.1, tokens=())})


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=9))
def test_ratios_are_taken_within_a_repeat(pairs: list[tuple[float, float]]) -> None:
    own, other = runs_of(*(a for a, _ in pairs)), runs_of(*(b for _, b in pairs))
    assert median_speed_ratio(own, other) == pytest.approx(median(b / a for a, b in pairs))


def test_one_different_token_is_noticed() -> None:
    plain = [MethodRun(prompt, repeat, generation(1), 0.0) for prompt in range(4) for repeat in range(2)]
    assert share_of_same_texts(plain, plain) == 1
    for tokens in ((1, 3), (1,)):
        drifted = [*plain[:-1], plain[-1]._replace(generation=generation(1, tokens))]
        assert share_of_same_texts(drifted, plain) == share_of_same_texts(plain, drifted) == 0.75
    together = MethodRun(0, 0, Generation([[1, 2], [3, 4]], 0.5, {}), 0.0)
    assert together.seconds_per_token == pytest.approx(0.125)
    other = together._replace(generation=Generation([[1, 2], [3, 5]], 0.5, {}))
    assert share_of_same_texts([together], [other]) == 0.5


def test_tokens_per_pass_and_acceptance_from_what_a_peer_counts() -> None:
    def counted(**counters: float) -> list[MethodRun]:
        return [MethodRun(0, 0, generation(1, (1,) * 12, **counters), 0.0)] * 2

    assert count_tokens_per_pass(counted(target_passes=4)) == count_tokens_per_pass(counted(accepted=8)) == 3
    assert count_tokens_per_pass(counted(drafted=8)) is None
    assert measure_acceptance(counted(drafted=8, accepted=2)) == 0.25
    assert measure_acceptance(counted(drafted=0, accepted=0)) is measure_acceptance(counted(drafted=8)) is None


def test_tables_group_by_setting_and_precision_and_join_files(tmp_path: Path) -> None:
    keys = [(s, p, peer) for s in ("short", "long") for p in ("fp32", "int4") for peer in ("vllm", "draftwood")]
    runs = {MethodKey(p, peer, PLAIN, s): runs_of(0.5 if peer == "vllm" else 0.25) for s, p, peer in keys}
    rows = summarise(runs)
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    for file, part in zip(files, (rows[:3], rows[3:]), strict=True):
        file.write_text(json.dumps({"rows": rows_to_json(part)}), encoding="utf-8")
    assert read_rows(files) == rows
    lines = to_markdown(rows).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    names = [line.split(" | ")[0].strip("| *") for line in lines[2:]]
    groups = ("short, fp32", "short, int4", "long, fp32", "long, int4")
    assert names == [name for group in groups for name in (group, "draftwood", "vllm")]
    assert lines[3].split(" | ")[2:6] == ["8", "8-8", "1.00", "2.00"]
