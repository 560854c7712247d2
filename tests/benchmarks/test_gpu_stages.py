"""The stages of the GPU check for TensorRT, over stand-ins for its package and for the driver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cuda_driver.machine import Machine
from tensorrt_bundles import demo_bundles

from benchmarks.gpu import tensorrt
from benchmarks.gpu.report import NotPossible
from draftwood.builder import pipeline
from draftwood.builder.engines import plan
from draftwood.builder.options import BuildOptions
from draftwood.runtime.engines.rounds import RoundDraws, RoundOutcome
from draftwood.runtime.engines.static.round import Round, TextPlace

pytestmark = pytest.mark.usefixtures("no_faults")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, gpu: Machine) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("bundles")
    with demo_bundles(folder, gpu) as open_llm:
        open_llm(1, None).close()
        yield folder / "1"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "TOKENS", 12)
    monkeypatch.setattr(tensorrt, "read_demo_prompts", lambda count: ["import os\n", "def f(x):\n"][:count])
    monkeypatch.setattr(tensorrt, "REQUESTS", 2)


def test_every_stage_of_a_bundle_that_works(bundle: Path) -> None:
    found = {name: stage(bundle) for name, stage in tensorrt.STAGES.items()}
    assert found["load"].figures["memory"].keys() == {"target", "draft"}
    assert set(found["capture"].figures["differences"].values()) == {0}
    assert found["first token"].figures["milliseconds"].keys() == {"first request", "second request"}
    texts = found["texts"].figures
    assert texts.pop("device_rounds") >= 2
    assert texts == {"same_tokens": {name: [12, 12] for name in ("tree", "chain", "chain, host")}}
    assert min(found["speed"].figures.values()) > 0


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
def test_low_bit_bundles_are_built_and_compared(
    precision: str, tmp_path: Path, gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the stage that builds to the one that compares texts. The stand-in compiles for the precision in `FORMS`."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(plan, "check_compiler", lambda options: None)
    built = []
    with demo_bundles(tmp_path, gpu) as open_llm:

        def build(options: BuildOptions, begin: Any) -> None:
            built.append(options.precision)
            open_llm(1, None, options.precision or "fp32").close()
            (tmp_path / f"1-{options.precision}").rename(options.output)

        monkeypatch.setattr(pipeline, "build", build)
        found = [
            tensorrt.check("tensorrt-rtx", stage, precision, str(tmp_path)) for stage in ("build", "load", "texts")
        ]
    assert built == [precision] and found[-1].figures["same_tokens"]["tree"] == [12, 12]


def test_passes_that_are_not_captured_fail_the_stage(
    bundle: Path, gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "captures", False)
    with pytest.raises(AssertionError, match=r"not captured: a pass of 1 rows cannot be captured as a CUDA graph"):
        tensorrt.capture_passes(bundle)


def test_a_device_whose_rounds_write_another_text_fails_the_stage(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Round.run

    def wrong(self: Round, texts: Sequence[TextPlace], draws: RoundDraws | None) -> list[RoundOutcome]:
        return [each._replace(accepted=(), num_scored=0, written=[5]) for each in run(self, texts, draws)]

    monkeypatch.setattr(Round, "run", wrong)
    with pytest.raises(AssertionError, match="text 0 of the tree parts from plain at token 0, no tie"):
        tensorrt.compare_texts(bundle)


def test_a_stage_without_a_bundle_is_not_possible(
    tmp_path: Path, gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(NotPossible, match="the bundle was not built"):
        tensorrt.check("tensorrt-rtx", "load", "our kernel", str(tmp_path))
