"""The comparison's arithmetic: medians, ratios in equal groups, and how rows are shown."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.figures import (
    MethodKey,
    MethodRow,
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
    best = MethodKey("int8", "draftwood", PLAIN)
    assert make_row(best, runs | {best: runs_of(1.0)}, runs[plain]).of_best is None


def test_the_best_other_peer_is_the_fastest_method_of_the_same_precision() -> None:
    runs = {
        MethodKey("fp32", "draftwood/native", PLAIN): runs_of(0.1),
        MethodKey("fp32", "llama.cpp", PLAIN): runs_of(0.4),
        MethodKey("fp32", "llama.cpp", "draft:3"): runs_of(0.2),
        MethodKey("int4", "llama.cpp", PLAIN): runs_of(0.05),
    }
    assert [row.of_best for row in summarise(runs)] == pytest.approx([2, 0.5, 1, 1])


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=9))
def test_ratios_are_taken_within_a_repeat(pairs: list[tuple[float, float]]) -> None:
    own, other = runs_of(*(a for a, _ in pairs)), runs_of(*(b for _, b in pairs))
    assert median_speed_ratio(own, other) == pytest.approx(median(b / a for a, b in pairs))
    # A machine that is slower in some repeats slows both.
    slowed = (
        [run._replace(generation=generation(run.generation.seconds * (1 + run.repeat))) for run in side]
        for side in (own, other)
    )
    assert median_speed_ratio(*slowed) == pytest.approx(median_speed_ratio(own, other))


def test_one_different_token_is_noticed() -> None:
    plain = [MethodRun(prompt, repeat, generation(1), 0.0) for prompt in range(4) for repeat in range(2)]
    drifted = [*plain[:-1], plain[-1]._replace(generation=generation(1, (1, 3)))]
    assert share_of_same_texts(plain, plain) == 1
    assert share_of_same_texts(drifted, plain) == share_of_same_texts(plain, drifted) == 0.75
    assert share_of_same_texts(plain, [*plain[:-1], plain[-1]._replace(generation=generation(1, (1,)))]) == 0.75


def test_tokens_per_pass_from_either_counter() -> None:
    def counted(**counters: float) -> list[MethodRun]:
        return [MethodRun(0, 0, generation(1, (1,) * 12, **counters), 0.0)] * 2

    assert count_tokens_per_pass(counted(target_passes=4)) == count_tokens_per_pass(counted(accepted=8)) == 3
    assert count_tokens_per_pass(counted(drafted=8)) is None


def test_an_empty_text_is_no_measurement() -> None:
    with pytest.raises(ValueError, match="llama"):
        summarise({MethodKey("fp32", "llama.cpp", PLAIN): runs_of(0.1, tokens=())})


def test_the_tables_group_by_precision_and_begin_with_the_fastest() -> None:
    speeds = {("fp32", "llama.cpp"): 0.4, ("fp32", "draftwood"): 0.2, ("int4", "draftwood/native"): 0.1}
    runs = {MethodKey(*names, PLAIN): runs_of(seconds) for names, seconds in speeds.items()}
    lines = to_markdown(summarise(runs)).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    names = [line.split(" | ")[0].strip("| ") for line in lines[2:]]
    assert names == ["**fp32**", "**draftwood**", "llama.cpp", "**int4**", "**draftwood/native**"]
    assert lines[3].split(" | ")[2:6] == ["10", "10-10", "1.00", "2.00"]


def test_rows_are_json() -> None:
    rows = summarise({MethodKey("fp32", "draftwood", PLAIN): runs_of(0.123456)})
    assert MethodRow(**json.loads(json.dumps(rows_to_json(rows)))[0]) == rows[0]._replace(
        tokens_per_second=16.2, low=16.2, high=16.2
    )


def test_settings_are_compared_apart() -> None:
    runs = {
        MethodKey("fp32", "draftwood/native", PLAIN, "short"): runs_of(0.1),
        MethodKey("fp32", "llama.cpp", PLAIN, "short"): runs_of(0.2),
        MethodKey("fp32", "draftwood/native", PLAIN, "long"): runs_of(0.8, tokens=(3, 4)),
        MethodKey("fp32", "llama.cpp", PLAIN, "long"): runs_of(0.4, tokens=(3, 4)),
    }
    rows = summarise(runs)
    assert [row.of_best for row in rows] == pytest.approx([2, 1, 0.5, 1])
    assert [row.same_as_first for row in rows] == [1, 1, 1, 1]
    shown = [line.split(" | ")[0].strip("| *") for line in to_markdown(rows).splitlines()[2:]]
    assert shown == ["short, fp32", "draftwood/native", "llama.cpp", "long, fp32", "llama.cpp", "draftwood/native"]


def test_texts_at_the_same_time_count_together_and_compare_one_by_one() -> None:
    together = MethodRun(0, 0, Generation([[1, 2], [3, 4]], 0.5, {"drafted": 8, "accepted": 2}), 0.0)
    assert together.seconds_per_token == pytest.approx(0.125)
    other = together._replace(generation=Generation([[1, 2], [3, 5]], 0.5, {}))
    assert share_of_same_texts([together], [other]) == 0.5
    assert measure_acceptance([together, together]) == 0.25
    assert measure_acceptance([together, other]) is None
    nothing = together._replace(generation=together.generation._replace(counters={"drafted": 0, "accepted": 0}))
    assert measure_acceptance([nothing]) is None


def test_the_parts_of_a_comparison_are_joined(tmp_path: Path) -> None:
    runs = {MethodKey("fp32", "draftwood", PLAIN): runs_of(0.5), MethodKey("int8", "vllm", PLAIN): runs_of(1)}
    rows = summarise(runs)
    files = [tmp_path / f"{number}.json" for number in range(2)]
    for file, row in zip(files, rows_to_json(rows), strict=True):
        file.write_text(json.dumps({"rows": [row]}), encoding="utf-8")
    assert read_rows(files) == rows
