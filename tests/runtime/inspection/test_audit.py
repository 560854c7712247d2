"""Audits: equal outputs pass, and an engine that computes differently in wide passes is caught at the right token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeEngine, Predict, mixture, random_model
from numpy.typing import NDArray

from draftwood.cli import generate
from draftwood.cli.generate import verdict
from draftwood.cli.main import main
from draftwood.runtime import LLM, RequestError, SamplingParams, SpeculativeConfig
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.base import ForwardOutput, KVCache, TokenBatch
from draftwood.runtime.inspection.audit import NOISE, AuditReport, audit, audit_output, compare
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler

V, PROMPT = 6, (0, 1, 2)
GREEDY = SamplingParams(max_tokens=20, temperature=0)
OPTIONS = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos"]


class WidePassError(FakeEngine):
    """Adds `error` to the logit of `token` after contexts of `length` tokens, in passes of several rows alone."""

    def __init__(self, predict: Predict, length: int, token: int, error: float) -> None:
        super().__init__(predict, V)
        self._length, self._token, self._error = length, token, error

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        output = super().score(batch, cache)
        if batch.num_tokens > 1:
            for row in np.flatnonzero(batch.position_ids[: batch.num_tokens] == self._length - 1):
                output.logits[row, self._token] += self._error
        return output


def decode(decoder: SpeculativeDecoder, params: SamplingParams) -> list[int]:
    chunks = decoder.generate(PROMPT, Sampler(params, PROMPT, (), V), seeded_streams(0), SpecDecodeStats())
    return [token for chunk in chunks for token in chunk.token_ids]


def audited(target: FakeEngine, params: SamplingParams = GREEDY) -> tuple[AuditReport, list[int]]:
    """The report on a speculative output over `target`, and that output."""
    draft = FakeEngine(mixture(target.predict, random_model(2, V), 0.7), V, "draft")
    tokens = decode(SpeculativeDecoder(target, draft, SpeculativeConfig("topk"), 4096, ()), params)
    return against_plain(target, tokens, params), tokens


def against_plain(target: FakeEngine, tokens: Sequence[int], params: SamplingParams = GREEDY) -> AuditReport:
    plain = SpeculativeDecoder(target, None, None, 4096, ())
    return compare(plain, PROMPT, Sampler(params, PROMPT, (), V), tokens)


def runner_up(predict: Predict, position: int) -> tuple[list[int], int, float]:
    """Plain output, and the second-best token at an output position with its distance in logits."""
    plain = decode(SpeculativeDecoder(FakeEngine(predict, V), None, None, 4096, ()), GREEDY)
    logits: NDArray[np.float64] = np.log(predict((*PROMPT, *plain[:position])))
    best, second = np.argsort(-logits)[:2].tolist()
    assert plain[position] == best
    return plain, second, float(logits[best] - logits[second])


def test_equal_outputs_pass() -> None:
    report, tokens = audited(FakeEngine(random_model(1, V), V))
    assert report == AuditReport(True, 20) and len(tokens) == 20
    assert report.to_dict()["numeric_noise"] is None


@pytest.mark.parametrize("position", [0, 1, 5, 13])
def test_an_engine_that_differs_in_wide_passes_is_caught(position: int) -> None:
    predict = random_model(1, V)
    plain, second, gap = runner_up(predict, position)
    report, tokens = audited(WidePassError(predict, len(PROMPT) + position, second, gap + 0.5))
    assert tokens[:position] == plain[:position]
    assert report[:5] == (False, position, position, second, plain[position])
    assert report.logit_gap == pytest.approx(gap, abs=1e-6)
    assert not report.numeric_noise and "a bug" in verdict(report)


def test_noise_is_told_from_a_bug() -> None:
    """Two logits closer than passes of different widths may differ by."""
    base = random_model(1, V)

    def predict(context: tuple[int, ...]) -> NDArray[np.float64]:
        weights = base(context).copy()
        best, second = np.argsort(-weights)[:2]
        weights[second] = weights[best] * np.exp(-NOISE / 10)
        return np.asarray(weights / weights.sum())

    plain, second, gap = runner_up(predict, 4)
    report, _ = audited(WidePassError(predict, len(PROMPT) + 4, second, NOISE / 5))
    assert report[:5] == (False, 4, 4, second, plain[4])
    assert report.logit_gap == pytest.approx(NOISE / 10, rel=1e-6)
    assert gap < NOISE and report.numeric_noise and "numeric noise" in verdict(report)


def test_an_output_that_ends_early_or_late_differs() -> None:
    target = FakeEngine(random_model(1, V), V)
    tokens = audited(target)[1]
    assert against_plain(target, tokens[:7]) == AuditReport(False, 7, 7, None, tokens[7])
    assert against_plain(target, [*tokens, 3]) == AuditReport(False, 20, 20, 3, None)
    assert "ended" in verdict(against_plain(target, tokens[:7]))


def test_an_output_that_a_stop_string_ended_is_no_divergence() -> None:
    target = FakeEngine(random_model(1, V), V)
    stopped = SamplingParams(max_tokens=20, temperature=0, stop="x")
    assert against_plain(target, audited(target)[1][:7], stopped) == AuditReport(True, 7)


def test_penalties_count_on_both_sides() -> None:
    params = SamplingParams(max_tokens=20, temperature=0, frequency_penalty=1.5, repetition_penalty=1.3)
    assert audited(FakeEngine(random_model(1, V), V), params)[0] == AuditReport(True, 20)


def test_a_real_bundle_passes_without_opening_anything_again(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    with LLM(tiny_bundle, SpeculativeConfig("topk", merge="gsd")) as llm:
        monkeypatch.setattr(type(llm.bundle), "open_engine", None)
        assert audit(llm, "hello", params) == AuditReport(True, 16)
        tokens = llm.generate("hello", params)[0].token_ids
        wrong = [*tokens[:3], (tokens[3] + 1) % 60, *tokens[4:]]
        report = audit_output(llm, llm.encode("hello"), params, wrong)
        assert (report.position, report.speculative_token, report.plain_token) == (3, wrong[3], tokens[3])
        assert report.logit_gap is not None and report.logit_gap > 0


def test_the_command_audits(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(tiny_bundle), "--prompt", "hello", *OPTIONS, "--audit"]
    assert main(command) == 0
    assert "all 12 tokens" in capsys.readouterr().err
    page = tmp_path / "out.html"
    assert main([*command, "--json", "--explain", str(page)]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["audit"]["equal"] is True and fields["audit"]["num_tokens"] == len(fields["token_ids"]) == 12
    assert page.is_file()


def test_a_divergence_is_exit_code_1(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is falsified between generation and audit."""

    def falsified(llm: LLM, prompt: list[int], params: SamplingParams, token_ids: list[int]) -> AuditReport:
        return audit_output(llm, prompt, params, [*token_ids[:5], (token_ids[5] + 1) % 60, *token_ids[6:]])

    monkeypatch.setattr(generate, "audit_output", falsified)
    command = ["generate", str(tiny_bundle), "--prompt", "hello", *OPTIONS, "--audit"]
    assert main(command) == 1
    assert "token 6 differs" in capsys.readouterr().err.replace("\n", " ")
    assert main([*command, "--json"]) == 1
    fields = json.loads(capsys.readouterr().out)["audit"]
    assert (fields["equal"], fields["position"], fields["numeric_noise"]) == (False, 5, False)


def test_what_cannot_be_audited_is_refused(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(tiny_bundle), "--prompt", "hello", "--audit"]
    for more, named in (([], "temperature to 0"), (["--temperature", "0", "--no-speculation"], "turn speculation on")):
        assert main([*command, *more]) == 2 and named in capsys.readouterr().err
    with LLM(tiny_bundle) as llm, pytest.raises(RequestError, match="temperature to 0"):
        audit(llm, "hello", SamplingParams(max_tokens=4))
