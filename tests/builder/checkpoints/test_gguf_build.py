"""What bundles have of GGUF files: the codes of their blocks, and tokenizers with the ids, texts, conversations and end
ids of the folder that they were written from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from adapters import write_adapter
from bundling import built
from checkpoints import write_checkpoint, write_tokenizer
from gguf import GGMLQuantizationType as Kind
from gguf_files import edited, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import train
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as TokenizerJson

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.gguf.tokenizer import SPLITS
from draftwood.builder.quantization.formats import FORMATS, QuantizedCheckpoint
from draftwood.builder.tokenizer import SENTENCEPIECE, check_same_vocabulary, convert_tokenizer
from draftwood.models.errors import CheckpointError
from draftwood.models.layers import HEAD_WEIGHT, network_of
from draftwood.runtime import LLM, SamplingParams
from draftwood.runtime.text.tokenizer import SETTINGS, TEMPLATE, TOKENIZER, Tokenizer

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 8}


KEPT = [
    (Kind.Q8_0, "native", "int8"),
    (Kind.Q8_0, "onnxruntime", "int8"),
    (Kind.Q4_0, "native", "int8"),
    (Kind.Q4_0, "native", "int4"),
    (Kind.Q4_0, "onnxruntime", "int4"),
    (Kind.Q4_1, "native", "int4"),
    (Kind.Q5_0, "native", "int8"),
    (Kind.Q4_0, "native", "int6"),
    (Kind.Q5_0, "native", "int5"),
    (Kind.Q5_1, "native", "int5"),
]


@pytest.mark.parametrize(("kind", "backend", "precision"), KEPT)
def test_blocks_that_a_format_holds_are_not_rounded_twice(
    kind: Kind, backend: str, precision: str, tmp_path: Path
) -> None:
    """Every matrix is the file's own number for number; a tied projection and rows of queries and keys included, and an
    embedding that is cut to the tokens of a draft. Codes of 8 bits, which the projection has beside 4, hold those of
    Q4_0, and have no offsets for those of Q4_1."""
    folder = write_checkpoint(tmp_path / "folder", num_key_value_heads=2, tie_word_embeddings=True, **SHAPE)
    checkpoint = Checkpoint(write_gguf(folder, tmp_path / "model.gguf", kind))
    for model in (checkpoint, checkpoint.cut(checkpoint.config.vocab_size - 10)):
        view = QuantizedCheckpoint(model, FORMATS[backend, precision])
        for name, shape in network_of(model.config).tensors().items():
            if len(shape) == 2:
                tied = HEAD_WEIGHT if "embed" in name and not view.config.tie_embeddings else name
                kept = view.tensor(tied)[: shape[0], : shape[1]]
                step = np.abs(model.tensor(name)).max() / 127 if "embed" in name and kind == Kind.Q4_1 else 0
                np.testing.assert_allclose(kept, model.tensor(name), rtol=0, atol=step)


def test_a_file_and_its_folder_write_the_same_text(tmp_path: Path) -> None:
    folder = write_tokenizer(write_checkpoint(tmp_path / "folder", hidden_size=64, intermediate_size=96))
    file, texts = write_gguf(folder, tmp_path / "model.gguf"), []
    for number, pair in enumerate(((file, folder), (folder, file))):
        with LLM(built(*pair, tmp_path / f"bundle{number}")) as llm:
            texts.append(llm.generate([1, 9, 40, 7], SamplingParams(temperature=0, max_tokens=24))[0].token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("kind", "backend", "precision"),
    [(Kind.Q4_1, "onnxruntime", "int4"), (Kind.Q8_0, "native", "int4"), (Kind.Q4_1, "native", "int8")],
)
def test_blocks_of_another_form_are_rounded_by_the_format(
    kind: Kind, backend: str, precision: str, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(write_gguf(write_checkpoint(tmp_path / "folder", **SHAPE), tmp_path / "model.gguf", kind))
    form = FORMATS[backend, precision]
    view = QuantizedCheckpoint(checkpoint, form)
    name = network_of(view.config).layers[0].output.weights[0]
    expected = form.quantize(name, checkpoint.tensor(name).astype(np.float32))
    np.testing.assert_array_equal(view.tensor(name), expected.dequantized())


def test_blocks_that_an_adapter_leaves_alone_are_kept(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "folder", num_key_value_heads=2, **SHAPE)
    file = write_gguf(folder, tmp_path / "model.gguf", Kind.Q8_0)
    write_adapter(tmp_path / "lora", folder, ("q_proj",))
    plain, adapted = Checkpoint(file), Checkpoint(file, tmp_path / "lora")
    for name, shape in network_of(plain.config).tensors().items():
        before, after = plain.blocks(name), adapted.blocks(name)
        assert (before is None) == (len(shape) < 2) and (after is None) == (before is None or "q_proj" in name)
        if before is not None and after is not None:
            np.testing.assert_array_equal(after.codes, before.codes)


@pytest.mark.parametrize(("kind", "precision"), [(Kind.Q4_K, "int4"), (Kind.Q5_K, "int5"), (Kind.Q6_K, "int6")])
def test_super_blocks_keep_their_codes(kind: Kind, precision: str, tmp_path: Path) -> None:
    """Without superblocks, too. A scale is a product of 17 bits, of which fp16 keeps 11: both terms of a weight change
    by 2^-12 of themselves. To round the weights again would change some of them by half a step."""
    folder = write_checkpoint(tmp_path / "folder", hidden_size=256, intermediate_size=256, num_attention_heads=8)
    checkpoint = Checkpoint(write_gguf(folder, tmp_path / "model.gguf", kind))
    view = QuantizedCheckpoint(checkpoint, FORMATS["native", precision])
    for name in network_of(checkpoint.config).layers[0].tensors():
        exact = checkpoint.tensor(name)
        if exact.ndim == 2:
            codes, scales, offsets, _ = view.quantized(name)
            parts = np.abs(codes).max() * np.abs(scales) + (0 if offsets is None else np.abs(offsets))
            parts = parts.repeat(codes.shape[1] // scales.shape[1], 1)
            assert (np.abs(view.tensor(name) - exact) <= 2**-11 * parts + 1e-6).all()


CORPUS = [
    "Once upon a time there was a little girl named Lily; she's 7, I'll say!",
    "def add(a, b):\n    return a + b  # 12345 and 2024-11-22\n\n\tx = {'k': [1, 22, 333]}",
    "THE Quick BrownFox jumpsOver ThE lazy doG...   don't WE'LL they'Re  naïve café 漢字 かな Привет",
] * 20
TEXTS = st.text("abeLIlstT'RE .,12345\n\r\t\u00e9e\u0301漢字かПр🙂<|>_▁", max_size=40)
# Pre-tokenizers as models' own tokenizer.json have them; the tables under test hold the patterns in parts.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
OWN: dict[str, list[Any]] = {
    "gpt-2": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated")],
    "qwen2": [pre_tokenizers.Split(Regex(QWEN2), "isolated")],
    "tekken": [pre_tokenizers.Split(Regex(TEKKEN), "isolated")],
}
GPT2_AT_THE_END = ("gpt-2", "smollm")
TEMPLATE_TEXT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_own(folder: Path, pre: str) -> None:
    """A tokenizer of a model that splits as `pre` says, trained on a few sentences."""
    tokenizer = TokenizerJson(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*OWN[pre], pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in GPT2_AT_THE_END)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    if pre == "llama-bpe":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    tokenizer.save(str(folder / TOKENIZER))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": pre == "llama-bpe"}
    (folder / SETTINGS).write_text(json.dumps(settings))
    (folder / TEMPLATE).write_text(TEMPLATE_TEXT)


class Pair:
    """A folder, the GGUF file written from it, and the tokenizers of both."""

    def __init__(self, folder: Path, file: Path) -> None:
        self.folder, self.file = folder, file
        out = [folder.parent / "ours", folder.parent / "theirs"]
        for each in out:
            each.mkdir()
        self.ours = Checkpoint(file).write_tokenizer(out[0])
        self.theirs = convert_tokenizer(folder, out[1])


@pytest.fixture(scope="module", params=OWN)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root, pre = tmp_path_factory.mktemp("pre"), request.param
    folder = write_checkpoint(root / "folder", vocab_size=424, num_hidden_layers=1)
    write_own(folder, pre)

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("tokenizer.ggml.pre")
        writer.add_tokenizer_pre(pre)

    pair = Pair(folder, write_gguf(folder, root / "model.gguf", edit=edit))
    yield pair
    for tokenizer in (pair.ours, pair.theirs):
        tokenizer.close()


@settings(max_examples=150)
@given(text=TEXTS | st.sampled_from([*CORPUS[:3], "<|im_start|>user\nhi<think> a<|im_end|>"]))
def test_any_text_has_the_folders_ids(pair: Pair, text: str) -> None:
    ids = pair.theirs.encode(text)
    assert pair.ours.encode(text) == ids
    assert pair.ours.encode(text, False) == pair.theirs.encode(text, False)
    assert pair.ours.decode(ids) == pair.theirs.decode(ids)


def test_vocabulary_and_special_tokens_are_the_folders(pair: Pair) -> None:
    check_same_vocabulary(pair.ours, pair.theirs)
    assert pair.ours.special_token_ids == pair.theirs.special_token_ids == {0, 1, 2}
    assert (pair.ours.bos_token_id, pair.ours.adds_bos) == (pair.theirs.bos_token_id, pair.theirs.adds_bos)
    assert Checkpoint(pair.file).eos_token_ids() == [0, 2]  # <|endoftext|> by its name
    assert Checkpoint(pair.folder).eos_token_ids() == [2]
    messages = [{"role": "user", "content": "What's 2 + 2?"}, {"role": "assistant", "content": "4"}]
    written = pair.ours.apply_chat_template(messages)
    assert written == pair.theirs.apply_chat_template(messages) and written.endswith("<|im_start|>assistant\n")


def test_every_split_is_usable() -> None:
    """Each of the table's patterns is one that the tokenizers library compiles, and none loses a character."""
    for name, split in SPLITS.items():
        tokenizer = TokenizerJson(models.BPE())
        split.apply(tokenizer)
        assert tokenizer.pre_tokenizer is not None
        for text in CORPUS[:3]:
            pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text)
            assert "".join(text[begin:end] for _, (begin, end) in pieces) == text, name
            assert len(pieces) > 5, name


def add_sentencepiece(file: Path, prefix: bool | None = None) -> Callable[[gguf.GGUFWriter], None]:
    """The tokenizer of a tokenizer.model, as llama.cpp's convert_hf_to_gguf.py writes it."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    ids = range(processor.vocab_size())
    kinds = [
        2 if processor.is_unknown(index) else 3 if processor.is_control(index) else 6 if processor.is_byte(index) else 1
        for index in ids
    ]

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([*(processor.id_to_piece(index) for index in ids), "[PAD340]", "[PAD341]"])
        writer.add_token_scores([*(processor.get_score(index) for index in ids), -10000.0, -10000.0])
        writer.add_token_types([*kinds, 5, 5])
        if prefix is not None:
            writer.add_add_space_prefix(prefix)

    return edit


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def spm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Pair, sentencepiece.SentencePieceProcessor]:
    """A SentencePiece model of LLaMA's kind, and a file whose embedding has two rows more than it has pieces."""
    root = tmp_path_factory.mktemp("spm")
    folder = write_checkpoint(root / "folder", vocab_size=342, num_hidden_layers=1)
    processor = train(folder, "bpe", CORPUS, hard_vocab_limit=True, add_dummy_prefix=request.param)
    edit = add_sentencepiece(folder / SENTENCEPIECE, None if request.param else False)
    pair = Pair(folder, write_gguf(folder, root / "model.gguf", edit=edit))
    return pair, processor


def test_padding_of_the_vocabulary_is_no_token(spm: tuple[Pair, sentencepiece.SentencePieceProcessor]) -> None:
    check_same_vocabulary(spm[0].ours, spm[0].theirs)
    assert Checkpoint(spm[0].file).config.vocab_size == 342
    assert Checkpoint(spm[0].file).eos_token_ids() == [2]  # where no key says it


@settings(max_examples=150)
@given(text=TEXTS.filter(lambda text: "<" not in text))
def test_sentencepiece_has_the_folders_ids(spm: tuple[Pair, sentencepiece.SentencePieceProcessor], text: str) -> None:
    pair, processor = spm
    ids = processor.encode(text)
    assert pair.ours.encode(text, add_special_tokens=False) == ids
    assert pair.ours.encode(text) == pair.theirs.encode(text) == [1, *ids]
    assert pair.ours.decode(ids) == pair.theirs.decode(ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_checkpoint(tmp_path_factory.mktemp("usual") / "folder", num_hidden_layers=1))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ggml.model", "t5", "tokenizers of the kind 't5' are not supported; 'gpt2' and 'llama' are"),
        ("ggml.model", None, "lacks tokenizer.ggml.model; convert the model again"),
        ("ggml.model", "llama", "lacks tokenizer.ggml.scores"),
        ("ggml.pre", None, "does not say how it splits texts, and .*qwen2.* are known"),
        ("ggml.pre", "default", "splits texts as 'default' does, and"),
        ("ggml.tokens", None, "lacks tokenizer.ggml.tokens"),
        ("ggml.tokens", ["a", "b", "a"], "has a token twice"),
        ("ggml.tokens", [1, 2, 3], "tokenizer.ggml.tokens must be a list of texts"),
        ("ggml.tokens", ["a", "b", "c"], "cannot be used: .*out of vocabulary"),
        ("ggml.token_type", [1, 2], "has 2 types for 288 tokens"),
        ("ggml.merges", None, "lacks tokenizer.ggml.merges"),
        ("ggml.merges", ["ab"], "a merge of its tokenizer is no pair"),
        ("ggml.merges", ["zz yy"], "cannot be used"),
        ("ggml.bos_token_id", 288, "bos_token_id is 288, and there are 288 tokens"),
        ("ggml.eos_token_id", 2**32 - 1, "eos_token_id"),
        ("ggml.add_bos_token", 1, "add_bos_token must be true or false, found 1"),
        ("chat_templates", [str(number) for number in range(20)], "has 20 chat templates"),
    ],
)
def test_damaged_tokenizers_are_refused(key: str, value: Any, message: str, folder: Path, tmp_path: Path) -> None:
    file = write_gguf(folder, tmp_path / "model.gguf", edit=edited(f"tokenizer.{key}", value))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(file).write_tokenizer(tmp_path)


def test_ends_of_texts_and_templates_of_a_file_are_the_bundles(folder: Path, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]

    def written(edit: Callable[[gguf.GGUFWriter], object]) -> Tokenizer:
        return Checkpoint(write_gguf(folder, tmp_path / "model.gguf", edit=edit)).write_tokenizer(tmp_path)

    with written(lambda writer: writer.add_chat_template(named)) as tokenizer:
        assert tokenizer.chat_templates == {"default": "D", "tool_use": "T"} and not (tmp_path / TEMPLATE).exists()
    with written(edited("tokenizer.ggml.add_eos_token", True)) as tokenizer:
        assert tokenizer.encode("a") == [1, *tokenizer.encode("a", add_special_tokens=False), 2]
    with written(edited("tokenizer.ggml.fim_mid_token_id", 2)) as tokenizer:
        assert tokenizer.infill_tokens == {"fim_mid_token": "</s>"}
    with written(edited("tokenizer.chat_template", "{{ messages[0].content }}\r\n")) as tokenizer:
        assert (tmp_path / TEMPLATE).read_bytes() == b"{{ messages[0].content }}\r\n"
        assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]).startswith("x")
