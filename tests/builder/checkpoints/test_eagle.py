"""EAGLE-3 heads of others: read as drafts, they compute what the layers of transformers do; other kinds are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_driver.machine import Machine
from heads import KEPT, Head, rows_of, write_authors, write_small_pair, write_speculators, write_target
from safetensors.torch import load_file, save_file
from tensorrt_bundles import demo_bundles

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.models.errors import CheckpointError, ConfigError
from draftwood.runtime import LLM, SamplingParams, SpeculativeConfig
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.engines.passes import causal_batch

TEXT = torch.tensor([1, 40, 77, 80, 9, 200, 31, 5, 12, 250, 66, 7])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("eagle") / "target")


def built(target: Path, head: Path, folder: Path, backend: str = "native", **options: Any) -> EngineBundle:
    chosen: dict[str, Any] = {"precision": "fp32", "draft_precision": "fp32", "max_length": 300} | options
    return build(BuildOptions(target, head, folder, backend, **chosen), lambda step: lambda: None)


HEADS: dict[str, tuple[Callable[[], Head], Callable[[Path, Head], Path], list[int]]] = {
    "authors": (lambda: Head("llama"), write_authors, [2, 4, 5]),
    "sglang": (
        lambda: Head("llama", taps=2),
        lambda path, head: write_authors(path, head, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 7]}),
        [1, 7],
    ),
    "speculators, llama": (lambda: Head("llama", norm_first=True), write_speculators, [2, 4, 5]),
    "speculators, qwen3": (
        lambda: Head("qwen3", layers=2),
        lambda path, head: write_speculators(path, head, [1, 3, 6]),
        [1, 3, 6],
    ),
}


@pytest.mark.parametrize("backend", ["native", "onnxruntime"])
@pytest.mark.parametrize("form", HEADS)
def test_a_head_computes_what_its_layers_do(form: str, backend: str, target: Path, tmp_path: Path) -> None:
    """Rows of the text with the target's states, and two more tokens with the head's own."""
    make, write, taps = HEADS[form]
    head = make()
    bundle = built(target, write(tmp_path / "head", head), tmp_path / "bundle", backend)
    with torch.no_grad():
        if form in ("authors", "sglang"):
            head.embed_tokens.weight.copy_(load_file(target / "model.safetensors")["model.embed_tokens.weight"])
        states, tokens = head.fc(rows_of(target, TEXT, taps))[:-3], TEXT[1:-2]
        expected, own = head(tokens, states)
        for token in TEXT[-2:]:
            tokens, states = torch.cat((tokens, token[None])), torch.cat((states, own[-1:]))
            further, own = head(tokens, states)
            expected = torch.cat((expected, further[-1:]))

    def scored(engine: Any, cache: Any, ids: list[int], given: Any = None) -> Any:
        output = engine.score(causal_batch(engine.spec, ids, cache.length, states=given, states_read=True), cache)
        cache.commit(range(len(ids)))
        return output.logits[0].copy(), output.states.copy()

    engines = [bundle.open_engine(role) for role in ("target", "draft")]
    caches: list[Any] = [engine.new_cache() for engine in engines]
    shown, found, last = scored(engines[0], caches[0], TEXT.tolist())[1], [], np.zeros((1, 32), np.float32)
    for index, token in enumerate(TEXT[1:].tolist()):
        given = np.zeros((1, shown.shape[1] + 32), np.float32)
        given[0, :-32], given[0, -32:] = (shown[index], 0) if index < len(TEXT) - 3 else (0, last[-1])
        logits, last = scored(engines[1], caches[1], [token], given)
        found.append(logits)
    np.testing.assert_allclose(np.stack(found), expected.numpy(), atol=2e-4)
    for engine in engines:
        engine.close()


PROMPTS = ["one two three", "one two", "e", "one two three four five six seven eight nine ten eleven twelve " * 2]
CONFIGS = (
    SpeculativeConfig("chain", max_draft_len=3, budget="fixed"),
    SpeculativeConfig("topk", max_total_draft_tokens=7, max_draft_len=3, budget="fixed"),
    SpeculativeConfig(),
)
Proposals = dict[tuple[int, ...], set[Any]]


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> Proposals:
    """Of rounds of the host, by the text before them."""
    found, propose = Proposals(), SpeculativeDecoder._propose

    def watched(self: SpeculativeDecoder, request: Any, *rest: Any) -> Any:
        proposal = yield from propose(self, request, *rest)
        found.setdefault(tuple(request.tokens), set()).add((len(proposal.tree), *proposal.tree.token_ids))
        return proposal

    monkeypatch.setattr(SpeculativeDecoder, "_propose", watched)
    return found


def greedy_texts(llm: LLM, prompts: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_greedy_texts_are_those_of_plain_decoding(precision: str, tmp_path: Path, proposals: Proposals) -> None:
    """Bit for bit, alone and several at a time, and so are the proposals. A seed gives its text beside others, too."""
    bundle = built(*write_small_pair(tmp_path), tmp_path / "bundle", precision=precision, draft_precision="int8")
    assert bundle.manifest.engines["draft"].model.draft_context == 64
    with LLM(bundle.folder, speculative=None) as llm:
        plain = greedy_texts(llm, PROMPTS)
    for config in CONFIGS:
        proposals.clear()
        with LLM(bundle.folder, speculative=config) as llm:
            assert greedy_texts(llm, PROMPTS) == plain
            assert [greedy_texts(llm, each)[0] for each in PROMPTS] == plain
            assert config.budget != "fixed" or {len(each) for each in proposals.values()} == {1}
            seeded = [SamplingParams(max_tokens=30, seed=each) for each in range(4)]
            drawn = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, seeded)]
            assert llm.generate(PROMPTS[1], seeded[1])[0].outputs[0].token_ids == drawn[1]


@pytest.mark.parametrize("max_batch", [1, 3])
@pytest.mark.usefixtures("no_faults")
def test_plans_write_the_same(max_batch: int, tmp_path: Path, proposals: Proposals, gpu: Machine) -> None:
    """Over the driver in libcuda's place, by rounds of the host, which propose what those of the native engine do."""
    pair = write_small_pair(tmp_path)
    with LLM(built(*pair, tmp_path / "native").folder, CONFIGS[1]) as llm:
        plain = greedy_texts(llm, PROMPTS)
    with demo_bundles(tmp_path, gpu, *pair) as open_llm:
        for config in (*CONFIGS[1:], None):
            with open_llm(max_batch, config) as llm:
                assert greedy_texts(llm, PROMPTS) == plain
            assert config != CONFIGS[1] or {len(each) for each in proposals.values()} == {1}


def edited(folder: Path, **settings: Any) -> Path:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | settings))
    return folder


OTHER_KINDS: dict[str, dict[str, Any]] = {
    "EAGLE-1 or EAGLE-2": {"architectures": ["LlamaForCausalLMEagle"]},
    "Medusa": {"architectures": ["MedusaModel"], "medusa_num_heads": 4},
    "Hydra": {"hydra_num_heads": 4, "architectures": ["HydraModel"]},
    "DFlash": {"speculators_model_type": "dflash"},
    "P-EAGLE": {"speculators_model_type": "peagle"},
    r"multi-token prediction \(MTP\)": {"architectures": ["Qwen3NextMTP"]},
    "'eagle'": {"speculators_model_type": "eagle"},  # of version 1 or 2
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_are_refused_by_name(kind: str, target: Path, tmp_path: Path) -> None:
    folder = edited(write_authors(tmp_path / "head", Head("llama")), **OTHER_KINDS[kind])
    with pytest.raises(CheckpointError, match=f"of the kind {kind}, which is not supported: EAGLE-3"):
        Checkpoint(folder, None, Checkpoint(target))


def test_an_older_eagle_is_known_by_its_tensors(target: Path, tmp_path: Path) -> None:
    folder = edited(write_authors(tmp_path / "head", Head("llama")), architectures=["LlamaForCausalLM"])
    checkpoint = Checkpoint(folder, None, Checkpoint(target))
    assert "reads the target after 2, 4, 5 layers; the embedding is the target's" in checkpoint.notes[0]
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.replace("midlayer", "layers.0"): each for name, each in tensors.items()}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match="EAGLE-1 or EAGLE-2"):
        Checkpoint(folder, None, Checkpoint(target))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "norms": ({"norm_output": True}, "norm_output of heads after EAGLE-3"),
    "layers": ({"model_type": "gemma"}, "layers of 'gemma' in a head are not supported"),
    "taps beyond": ({"eagle_aux_hidden_state_layer_ids": [2, 9]}, "goes beyond the target's 8 layers"),
    "taps": ({"eagle_aux_hidden_state_layer_ids": [3, 2]}, "1 to 3 numbers that ascend"),
    "many taps": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}, "1 to 3 numbers that ascend"),
    "no taps": ({"eagle_aux_hidden_state_layer_ids": "all"}, "1 to 3 numbers that ascend"),
    "fewer taps": ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight has shape \(32, 96\)"),
    "size": ({"hidden_size": 64}, "it is the head of another target"),
    "a setting": ({"qkv_bias": True}, "'qkv_bias' is not a setting"),
    "columns": ({"draft_vocab_size": KEPT - 1}, rf"d2t is I64 \[{KEPT}\]"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_settings_that_are_not_supported_are_refused(wrong: str, target: Path, tmp_path: Path) -> None:
    settings, message = REFUSED[wrong]
    folder = edited(write_authors(tmp_path / "head", Head("llama")), **settings)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder, None, Checkpoint(target))


def test_what_a_head_cannot_be_is_refused(target: Path, tmp_path: Path) -> None:
    head = write_authors(tmp_path / "head", Head("llama"))
    with pytest.raises(CheckpointError, match="give it as --draft beside its target"):
        Checkpoint(head)
    with pytest.raises(CheckpointError, match="leave --draft-lora out"):
        built(target, head, tmp_path / "bundle", draft_lora=target)
    with pytest.raises(ConfigError, match="--acceptance-head is not for"):
        built(target, head, tmp_path / "bundle", acceptance_head=target)
    calibrated: dict[str, Any] = {"precision": "int4", "draft_precision": "int4", "calibration": target}
    with pytest.raises(ConfigError, match="--draft-precision int8"):
        built(target, head, tmp_path / "bundle", **calibrated)
    small = write_target(tmp_path / "small", layers=4)
    with pytest.raises(CheckpointError, match="since the target has 4 alone"):
        Checkpoint(head, None, Checkpoint(small))
    tensors = load_file(head / "model.safetensors")
    save_file(tensors | {"midlayer.extra.weight": torch.zeros(1)}, head / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor midlayer\.extra\.weight is none of an EAGLE-3 head"):
        Checkpoint(head, None, Checkpoint(target))
