"""vLLM's keywords of LLM: mapped where they have a meaning here, else an error or a warning that names the fix."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from draftwood import LLM, AsyncLLM, ConfigError, RequestError, SamplingParams, SpeculativeConfig
from draftwood.runtime.bundle.cache import Model
from draftwood.runtime.bundle.foreign import with_others

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
