"""LoRA adapters: what is merged is W + scale * B @ A, and an adapter that is not wholly understood is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import PREFIX, save_adapter, write_adapter
from bundling import resigned
from checkpoints import edit_weights, transformers_logits, write_checkpoint, write_tokenizer
from engine_parts import TOLERANCE, random_text
from numpy.typing import NDArray
from safetensors.torch import load_file

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.lora import PICKLED, SETTINGS, WEIGHTS
from draftwood.cli.main import main
from draftwood.models.errors import BundleError, CheckpointError
from draftwood.models.layers import network_of
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.base import Engine
from draftwood.runtime.engines.passes import prefill

Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "plain")


def merged(plain: Path, tensors: dict[str, torch.Tensor], module: str, scale: float) -> NDArray[Any]:
    """A weight with its change, in fp64."""
    first, second = (tensors[f"{PREFIX}{module}.lora_{end}.weight"].double() for end in "AB")
    weight = load_file(plain / "model.safetensors")[f"{module}.weight"].double() + scale * (second @ first)
    return np.asarray(weight.numpy())


def last_logits(engine: Engine, text: list[int]) -> NDArray[np.float32]:
    output = prefill(engine, engine.new_cache(), text)
    assert output is not None
    logits: NDArray[np.float32] = output.logits[0].copy()
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rslora", [False, True])
def test_every_tensor_is_merged_or_left_alone(rslora: bool, dtype: torch.dtype, plain: Path, tmp_path: Path) -> None:
    settings = {"use_rslora": rslora, "lora_alpha": 6}
    tensors = write_adapter(tmp_path / "lora", plain, settings=settings, dtype=dtype)
    checkpoint, before = Checkpoint(plain, tmp_path / "lora"), Checkpoint(plain)
    scale = 6 / math.sqrt(4) if rslora else 6 / 4
    changed = 0
    for name in network_of(checkpoint.config).tensors():
        module = name.removesuffix(".weight")
        if f"{PREFIX}{module}.lora_A.weight" in tensors:
            changed += 1
            expected = merged(plain, tensors, module, scale)
            np.testing.assert_allclose(checkpoint.tensor(name), expected, rtol=2e-6, atol=2e-6)
            assert checkpoint.tensor(name).dtype == np.float32
        else:
            np.testing.assert_array_equal(checkpoint.tensor(name), before.tensor(name))
    assert changed == 6
    assert checkpoint.notes == ("the adapter lora is merged (matrices changed: 6, tensors replaced: 0)",)


def test_ranks_and_scales_of_single_modules(plain: Path, tmp_path: Path) -> None:
    """The first key that matches counts, as in PEFT; a key matches the end of a name, or with ^ the whole of it."""
    first, other = Q, Q.replace("layers.1", "layers.0")
    settings = {
        "rank_pattern": {f"^{first}": 2, "layers.0.self_attn.q_proj": 3},
        "alpha_pattern": {"1.self_attn.q_proj": 5, "q_proj": 7, "proj": 100, "^q_proj": 100},
    }
    tensors = write_adapter(tmp_path / "lora", plain, ["q_proj", "v_proj"], {first: 2, other: 3}, settings)
    checkpoint = Checkpoint(plain, tmp_path / "lora")
    value = Q.replace("q_proj", "v_proj")
    for module, scale in ((first, 5 / 2), (other, 7 / 3), (value, 8 / 4)):
        expected = merged(plain, tensors, module, scale)
        np.testing.assert_allclose(checkpoint.tensor(f"{module}.weight"), expected, rtol=2e-6, atol=2e-6)


def test_modules_and_biases_that_were_trained_whole(tmp_path: Path) -> None:
    """They replace the model's; one of them has an adapter, too."""
    plain = write_checkpoint(tmp_path / "plain", "biases")
    tensors = write_adapter(tmp_path / "lora", plain, ["q_proj", "lm_head"], settings={"bias": "all"})
    head, bias = torch.randn(288, 32), torch.randn(32)
    whole = {f"{PREFIX}lm_head.base_layer.weight": head, f"{PREFIX}{Q}.base_layer.bias": bias}
    settings = {"bias": "all", "modules_to_save": ["lm_head"]}
    checkpoint = Checkpoint(plain, save_adapter(tmp_path / "whole", tensors | whole, settings))
    np.testing.assert_array_equal(checkpoint.tensor(f"{Q}.bias"), bias.numpy())
    first, second = (tensors[f"{PREFIX}lm_head.lora_{end}.weight"].double() for end in "AB")
    expected = (head.double() + 2 * (second @ first)).numpy()
    np.testing.assert_allclose(checkpoint.tensor("lm_head.weight"), expected, rtol=2e-6, atol=2e-6)
    assert checkpoint.notes[0].endswith("(matrices changed: 3, tensors replaced: 2)")


def test_engines_of_merged_models_compute_what_transformers_does(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Target and draft with an adapter each; the bundle says so."""
    write_tokenizer(plain)
    folders = {role: tmp_path / f"{role}-lora" for role in ("target", "draft")}
    whole = {role: Path(shutil.copytree(plain, tmp_path / role)) for role in folders}
    for role, modules in (("target", ["q_proj", "gate_proj", "lm_head"]), ("draft", ["k_proj", "down_proj"])):
        tensors = write_adapter(folders[role], plain, modules)
        changes = {
            name.removeprefix(PREFIX).replace(".lora_A", ""): torch.from_numpy(
                merged(plain, tensors, name.removeprefix(PREFIX).removesuffix(".lora_A.weight"), 2)
            ).float()
            for name in tensors
            if ".lora_A" in name
        }
        edit_weights(whole[role], lambda weights, changes=changes: weights.update(changes))  # type: ignore[misc]
    (folders["target"] / "tokenizer.json").write_text("{}")
    bundle, text = tmp_path / "bundle", random_text(40)
    pair = ["--target", str(plain), "--draft", str(plain), "--output", str(bundle), "--backend", "onnxruntime"]
    adapters = ["--lora", str(folders["target"]), "--draft-lora", str(folders["draft"])]
    assert main(["build", *pair, *adapters, "--no-profile", "--precision", "fp32", "--widths", "1,4"]) == 0
    assert "The target: the adapter target-lora is merged" in capsys.readouterr().out
    assert Checkpoint(plain, folders["target"]).notes == (
        "the adapter target-lora is merged (matrices changed: 5, tensors replaced: 0)",
        "the tokenizer and template of the adapter target-lora are not used, but the model's own",
    )
    opened = EngineBundle.open(bundle)
    for role in folders:
        engine = opened.open_engine(role)
        expected = transformers_logits(whole[role])([text])[0]
        assert np.abs(expected - transformers_logits(plain)([text])[0]).max() > 0.1
        np.testing.assert_allclose(last_logits(engine, text), expected, atol=TOLERANCE)
        engine.close()
    assert opened.manifest.adapters == {"target": "target-lora", "draft": "draft-lora"}
    assert main(["inspect", str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "merged adapter" in shown and "target-lora" in shown and "draft-lora" in shown
    for forged in ({"other": "a"}, {"target": "\x1b[2J"}, {"target": 1}, ["target"]):
        resigned(bundle, lambda content, forged=forged: content.update(adapters=forged))  # type: ignore[misc]
        with pytest.raises(BundleError, match="adapter"):
            EngineBundle.open(bundle)


def refused(plain: Path, lora: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        Checkpoint(plain, lora)
    assert len(str(error.value)) < 700 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "ADALORA"}, "peft_type is 'ADALORA' and not 'LORA', which is not supported: merge it into the"),
        ({"use_dora": True}, r"'use_dora' is True, which is not supported: merge it into the model with peft's merge"),
        ({"fan_in_fan_out": True}, "'fan_in_fan_out' is True"),
        ({"lora_bias": True}, "'lora_bias' is True"),
        ({"trainable_token_indices": [3]}, "'trainable_token_indices' is a list"),
        ({"layer_replication": [[0, 1]]}, "'layer_replication' is a list"),
        ({"alora_invocation_tokens": [1, 2]}, "'alora_invocation_tokens' is a list"),
        ({"target_parameters": ["a"]}, "'target_parameters' is a list"),
        ({"a_later_kind": {"a": 1}}, "'a_later_kind' is a dict"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' changes the model itself, which"),
        ({"init_lora_weights": 1}, "init_lora_weights 1 changes the model itself"),
        ({"rank_pattern": {".*q_proj": 4}}, r"rank_pattern has '\.\*q_proj', and not the name of a module, which"),
        ({"alpha_pattern": {"(a+)+$": 4}}, "alpha_pattern has .* and not the name of a module"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern must be a whole number from 1"),
        ({"r": "4"}, "r must be a whole number from 1 to 65536, found '4'"),
        *(({"r": rank}, "r must be a whole number") for rank in (True, 10**400)),
        *(({"lora_alpha": a}, "lora_alpha must be a number") for a in (float("nan"), float("inf"), None)),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"r": 8}, r"lora_A\.weight has shape \(4, .*and should have \(8, .*for rank 8 and a matrix of"),
    ],
)
def test_settings_that_are_not_done_are_refused_by_name(
    settings: dict[str, Any], message: str, plain: Path, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "lora", plain, settings=settings)
    refused(plain, tmp_path / "lora", message)


NOTHING, OF_HEAD = "belongs to nothing in the model", f"{PREFIX}lm_head"
ROWS = torch.zeros(4, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{Q}.lora_A.weight": ROWS}, NOTHING),
        ({f"{PREFIX}{Q}.lora_C.weight": ROWS}, NOTHING),
        ({f"{PREFIX}{Q}.lora_magnitude_vector": ROWS}, NOTHING),
        ({f"{PREFIX}model.norm.lora_A.weight": ROWS}, NOTHING),
        ({f"{PREFIX}{Q.replace('layers.1', 'layers.2')}.lora_A.weight": ROWS}, NOTHING),
        ({f"{PREFIX}model.embed_tokens.lora_embedding_A": ROWS}, "adapts an embedding"),
        ({f"{PREFIX}{Q}.lora_A.weight": None}, rf"{Q}\.lora_A\.weight is missing; the adapter is incomplete"),
        ({f"{PREFIX}{Q}.lora_B.weight": None}, rf"{Q}\.lora_B\.weight is missing; the adapter is incomplete"),
        ({f"{OF_HEAD}.weight": torch.zeros(300, 32)}, r"has shape \(300, 32\), the model's has \(288, 32\)"),
        ({f"{OF_HEAD}.weight": torch.zeros(288, 32).char()}, "is I8; use an fp32, fp16 or bf16 adapter"),
        ({f"{OF_HEAD}{part}.weight": torch.zeros(288, 32) for part in ("", ".base_layer")}, "holds a tensor twice"),
    ],
)
def test_tensors_that_are_too_many_missing_or_of_another_model_are_refused(
    changes: dict[str, torch.Tensor | None], message: str, plain: Path, tmp_path: Path
) -> None:
    """None: the tensor is left out."""
    tensors = write_adapter(tmp_path / "lora", plain) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    refused(plain, save_adapter(tmp_path / "lora", kept), message)


def test_an_adapter_of_one_of_two_tied_matrices_is_refused(tmp_path: Path) -> None:
    """PEFT trains each of them alone, as the untied model has them."""
    plain = write_checkpoint(tmp_path / "tied", "tied")
    embedding = load_file(plain / "model.safetensors")["model.embed_tokens.weight"]
    saved = {f"{PREFIX}model.embed_tokens.weight": 2 * embedding}
    refused(plain, save_adapter(tmp_path / "lora", saved), "ties them together: store lm_head.weight")
    edit_weights(plain, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    write_adapter(tmp_path / "head", plain, ["lm_head"])
    refused(plain, tmp_path / "head", "ties them together: store lm_head.weight")
    config = json.loads((plain / "config.json").read_text()) | {"tie_word_embeddings": False}
    (plain / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(plain, tmp_path / "lora")
    for name, expected in (("model.embed_tokens.weight", 2 * embedding), ("lm_head.weight", embedding)):
        np.testing.assert_array_equal(checkpoint.tensor(name), expected.numpy())


def test_folders_that_are_none(plain: Path, tmp_path: Path) -> None:
    lora = tmp_path / "lora"
    refused(plain, lora, rf"is not a folder: give a LoRA folder of PEFT, with {SETTINGS} and {WEIGHTS}")
    refused(plain, plain, rf"{SETTINGS} is missing: is this a LoRA folder of PEFT")
    write_adapter(lora, write_checkpoint(tmp_path / "other", hidden_size=64))
    refused(plain, lora, r"should have .* give the model that the adapter was trained on")
    refused(plain, save_adapter(lora, {}), "holds no tensors")
    (lora / WEIGHTS).write_bytes(b"")
    refused(plain, lora, "is not a readable safetensors file")
    (lora / WEIGHTS).unlink()
    refused(plain, lora, rf"{WEIGHTS} is missing: is this a LoRA folder of PEFT")
    (lora / PICKLED).write_bytes(b"")
    refused(plain, lora, "holds a pickled adapter, which can run code when opened")
    (lora / SETTINGS).write_text("[")
    refused(plain, lora, "is not readable JSON")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_numbers_that_are_none(value: float, plain: Path, tmp_path: Path) -> None:
    tensors = write_adapter(tmp_path / "lora", plain)
    tensors[f"{PREFIX}{Q}.lora_B.weight"].fill_(value)
    tensors[f"{PREFIX}{Q}.lora_A.weight"].fill_(1)
    checkpoint = Checkpoint(plain, save_adapter(tmp_path / "lora", tensors))
    with pytest.raises(CheckpointError, match=f"tensor {Q}.weight holds NaN or infinity"):
        checkpoint.tensor(f"{Q}.weight")
