"""Settings of an LLM: vLLM's keywords are mapped, or named with the fix; speculation fits the bundle's engines."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftwood import LLM, AsyncLLM, ConfigError, RequestError, SamplingParams, SpeculativeConfig
from draftwood.models.bindings import DRAFT
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.bundle.cache import Model
from draftwood.runtime.bundle.fit import fitted
from draftwood.runtime.bundle.foreign import with_others
from draftwood.runtime.serving.triton.contract import changed
from draftwood.runtime.speculation.bounds import LOOKUP_SIZES

OWN = SpeculativeConfig()


@pytest.mark.parametrize(
    ("others", "model", "speculative"),
    [
        ({}, Model("m"), OWN),
        ({"tensor_parallel_size": 1, "tokenizer": None, "quantization": None, "dtype": "auto"}, Model("m"), OWN),
        ({"max_model_len": 512, "dtype": "bfloat16"}, Model("m", None, "bf16", 512), OWN),
        ({"dtype": "torch.float16", "revision": "main"}, Model("m@main", None, "fp16"), OWN),
        (
            {"speculative_config": {"model": "d.gguf", "num_speculative_tokens": 5}},
            Model("m", "d.gguf"),
            SpeculativeConfig(max_draft_len=5, max_total_draft_tokens=5),
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}},
            Model("m"),
            SpeculativeConfig("lookup", lookup_ngram=3, lookup_len=4, max_draft_len=4),
        ),
        ({"speculative_config": {"model": "ngram"}}, Model("m"), SpeculativeConfig("lookup")),
    ],
)
def test_what_has_a_meaning_here_is_mapped(
    others: dict[str, Any], model: Model, speculative: SpeculativeConfig
) -> None:
    with warnings.catch_warnings(action="error"):
        assert with_others(Model("m"), OWN, others) == (model, speculative)


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({"gpu_memory_utilization": 0.9}, "gpu_memory_utilization has no effect here and can be left out"),
        ({"seed": 42}, "SamplingParams\\(seed="),
        ({"enforce_eager": True}, "engines are compiled ahead of time"),
    ],
)
def test_what_has_no_effect_is_a_warning(others: dict[str, Any], named: str, tiny_bundle: Path) -> None:
    with pytest.warns(UserWarning, match=named) as caught:
        LLM(tiny_bundle, **others).close()
    assert caught[0].filename == __file__, "the warning points at the script"


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({"tensor_parallel_size": 2}, "must be 1, not 2"),
        ({"tensor_paralel_size": 1}, "LLM has no keyword 'tensor_paralel_size'"),
        ({"thread": 2}, "did you mean threads?"),
        ({"quantization": "awq"}, "write precision='int8' or 'int4'"),
        ({"dtype": "int8"}, "precision='int8' makes weights of 8 bits"),
        ({"speculative_config": {"method": "eagle3", "model": "x"}}, "method 'eagle3' is not known here"),
        ({"speculative_config": {"num_spec_tokens": 3}}, "did you mean num_speculative_tokens?"),
        ({"speculative_config": "ngram"}, "must be a dictionary"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": "5"}}, "must be a whole number"),
        ({"max_model_len": 64}, "max_length is a choice of the build, and .* is a bundle"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(others: dict[str, Any], named: str, tiny_bundle: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        LLM(tiny_bundle, **others)


def test_contradictions_are_refused(tiny_bundle: Path) -> None:
    with pytest.raises(ConfigError, match="speculative and speculative_config say the same"):
        LLM("m", SpeculativeConfig("gsd"), speculative_config={"method": "ngram"})
    with pytest.raises(ConfigError, match="precision='int8' and vLLM's keyword for it differ"):
        LLM("m", precision="int8", dtype="half")
    with pytest.raises(ConfigError, match="model must be a path, not 5"):
        LLM(5)  # type: ignore[arg-type]
    with LLM(tiny_bundle) as llm, pytest.raises(ConfigError, match="threads is an option of LLM, which is open"):
        AsyncLLM(llm, threads=2)


def test_settings_say_which_name_was_meant() -> None:
    with pytest.raises(RequestError, match=r"SamplingParams has no 'max_token'; did you mean max_tokens?"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="has no 'guided_decoding': it has max_tokens"):
        SamplingParams(guided_decoding=None)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"SpeculativeConfig has no 'max_draft_length'; did you mean max_draft_len?"):
        SpeculativeConfig(max_draft_length=5)  # type: ignore[call-arg]


def test_a_list_of_texts_has_a_method_of_its_own(tiny_bundle: Path) -> None:
    """One LLM compares methods: `generate` takes `speculative` as `stream` does."""
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    with LLM(tiny_bundle) as llm:
        prompts = ["one", "two"]
        plain = llm.generate(prompts, params, speculative=None)
        chain = llm.generate(prompts, params, speculative=SpeculativeConfig("chain", budget="fixed"))
    assert [each.token_ids for each in plain] == [each.token_ids for each in chain]
    assert plain[0].stats.num_drafts == 0 < chain[0].stats.num_drafts


@pytest.fixture
def small(tiny_bundle: Path) -> EngineBundle:
    """A bundle whose passes have at most four rows."""
    whole = EngineBundle.open(tiny_bundle)
    engines = {role: replace(spec, widths=(1, 2, 4)) for role, spec in whole.manifest.engines.items()}
    return replace(whole, manifest=replace(whole.manifest, engines=engines))


def test_defaults_are_lowered(small: EngineBundle) -> None:
    lowered = fitted(SpeculativeConfig(), small)
    assert (lowered.max_draft_len, lowered.max_total_draft_tokens, lowered.frontier_width) == (3, 3, 4)
    assert fitted(lowered, small) == lowered
    assert fitted(SpeculativeConfig("lookup"), small).max_tokens == 3
    assert changed(SpeculativeConfig()) == {} and "max_draft_len=15" in repr(SpeculativeConfig())


def test_the_draft_has_room_for_every_row_that_a_proposal_can_score_and_no_more(tiny_bundle: Path) -> None:
    """These trees of five tokens score 3 + 3 + 2 + 1 rows, not three at each of nine depths."""
    tree = SpeculativeConfig("topk", max_draft_len=9, max_total_draft_tokens=5, frontier_width=3)
    whole = EngineBundle.open(tiny_bundle)

    def fitted_with(room: int, config: SpeculativeConfig) -> SpeculativeConfig:
        draft = whole.manifest.engines[DRAFT]
        slots = whole.manifest.max_length + draft.max_width + room
        engines = {**whole.manifest.engines, DRAFT: replace(draft, capacity=slots)}
        return fitted(config, replace(whole, manifest=replace(whole.manifest, engines=engines)))

    assert tree.max_draft_rows == 9 and fitted_with(9, tree) == tree
    with pytest.raises(ConfigError, match="scores up to 9 rows on the draft, whose cache has room for 8"):
        fitted_with(8, tree)
    unwritten = SpeculativeConfig("topk", max_total_draft_tokens=5, frontier_width=3)
    assert [fitted_with(room, unwritten).max_draft_len for room in (0, 3, 5, 6, 8, 9, 99)] == [1, 2, 2, 3, 4, 15, 15]


@pytest.mark.parametrize(
    "written",
    [
        SpeculativeConfig(max_total_draft_tokens=15),
        SpeculativeConfig("chain", max_draft_len=15),
        SpeculativeConfig("lookup", lookup_len=4),
    ],
)
def test_a_number_that_somebody_wrote_is_refused_also_where_it_is_the_default(
    small: EngineBundle, written: SpeculativeConfig
) -> None:
    for config in (written, SpeculativeConfig(**json.loads(json.dumps(changed(written))))):
        assert config is not None
        with pytest.raises(ConfigError, match="do not fit the target's widest pass of 4 rows"):
            fitted(config, small)


@pytest.mark.parametrize("name", LOOKUP_SIZES)
def test_the_size_of_a_lookup_is_refused_beside_a_draft(name: str, small: EngineBundle) -> None:
    """There a round takes lookups of several lengths, as long as they pay."""
    with pytest.raises(ConfigError, match=f"{name} is for grow='lookup'"):
        fitted(SpeculativeConfig(**{name: 3}), small)  # type: ignore[arg-type]  # each of its own type
    assert fitted(SpeculativeConfig("lookup", **{name: 3}), small)  # type: ignore[arg-type]
