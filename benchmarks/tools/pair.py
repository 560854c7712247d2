"""Write a random target and draft of a real size whose agreement is known.

    python -m benchmarks.tools.pair --size 202m --agreement 0.8 --output build/peers/202m

The pair has the costs of a trained pair of its size, since time does not depend on the values of weights, and a chosen
acceptance. It consists of two Hugging Face folders, `target` and `draft`, with one tokenizer, and `prompts.jsonl`.
Every peer loads it. The text is meaningless.

Target. The greedy text follows a permutation π of the words. π has a single cycle, so that the text never loops. The
entries of embeddings are random with standard deviation 1. Row π(t) of the vocabulary projection is the embedding of t
divided by √H. What the layers add to the residual stream is small (LAYER_SCALE). So the logit of π(t) after t is about
√H. Every other logit is √H times the cosine of two random directions: its deviation is 1, and its maximum over a
vocabulary 4 or 5. At H = 1024 the gap is 27, while rounding the weights to 4 bits changes a logit by 0.1. No precision
and no order of summation changes the text, so all peers write the same text.

Draft. It has embeddings of its own and the same π, except after the marked words, a share 1 - agreement of all words.
After a marked word, another word has the logit √H. For a share `second` of the marked words, π(t) has SECOND_LOGIT
times that logit and comes second; for the others it is no better than any word. The marks are independent of π, so
tokens of a text are accepted independently: a chain of γ tokens yields (1 - a^(γ+1)) / (1 - a) tokens per pass on
average.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.tools.record import make_parser
from draftwood.models.config import LlamaConfig
from draftwood.models.errors import CheckpointError, ConfigError, DraftwoodError
from draftwood.models.layers import EMBEDDING_WEIGHT, HEAD_WEIGHT, network_of
from draftwood.runtime.bundle.staging import staging_folder

LAYER_SCALE = 0.1  # standard deviation of a layer matrix's output over that of its input
SECOND_LOGIT = 0.6  # share of the best logit; from H = 64 on, random words do not reach it
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
FIRST_WORD = len(SPECIAL_TOKENS) + 256  # the words' ids follow those of the bytes
NUM_PROMPTS, PROMPT_WORDS = 16, 24


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model, without the vocabulary."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int

    def fields(self, vocab_size: int) -> dict[str, Any]:
        """The content of a Hugging Face config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.hidden_size // self.num_heads,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": "float32",
            "torch_dtype": "float32",
        }


@dataclass(frozen=True, slots=True)
class PairSize:
    target: ModelShape
    draft: ModelShape
    vocab_size: int


SIZES = {
    "1.1b": PairSize(ModelShape(2048, 22, 32, 4, 5632), ModelShape(768, 2, 12, 12, 3072), 32000),
    "202m": PairSize(ModelShape(1024, 12, 16, 4, 2816), ModelShape(128, 2, 4, 2, 384), 32000),
    "tiny": PairSize(ModelShape(128, 2, 4, 2, 256), ModelShape(64, 1, 2, 1, 128), 768),
}


class Agreement:
    """Which word follows which in the target's text, and which one the draft prefers.

    words: token ids of the words. following[i]: index of the word after word i. marked: indices of the words after
    which the draft prefers `wrong[i]`. seconds: those of `marked` after which `following[i]` is the draft's second
    choice.
    """

    def __init__(self, vocab_size: int, agreement: float, second: float, seed: int) -> None:
        """agreement, second: shares in [0, 1]. Raises ConfigError for other values."""
        for name, share in (("agreement", agreement), ("second", second)):
            if not 0 <= share <= 1:
                raise ConfigError(f"--{name} is a share and must be in [0, 1], not {share}")
        rng = np.random.default_rng(seed)
        self.words = np.arange(FIRST_WORD, vocab_size)
        count = len(self.words)
        cycle = rng.permutation(count)
        self.following = np.empty(count, np.int64)
        self.following[cycle] = np.roll(cycle, -1)
        order = rng.permutation(count)
        self.marked = order[: round((1 - agreement) * count)]
        self.seconds = self.marked[: round(second * len(self.marked))]
        # Half a cycle away: never the right word, and another one for every marked word.
        self.wrong = np.empty(count, np.int64)
        self.wrong[cycle] = np.roll(cycle, -(count // 2))


def make_target_head(embeddings: NDArray[np.float32], agreement: Agreement) -> NDArray[np.float32]:
    """The target's vocabulary projection, [V, H]; rows of bytes and special tokens are zero and never win."""
    head = np.zeros_like(embeddings)
    own = embeddings[agreement.words] / np.float32(np.sqrt(embeddings.shape[1]))
    head[agreement.words[agreement.following]] = own
    return head


def make_draft_head(embeddings: NDArray[np.float32], agreement: Agreement) -> NDArray[np.float32]:
    """The draft's vocabulary projection, [V, H]."""
    head = make_target_head(embeddings, agreement)
    words, marked, seconds = agreement.words, agreement.marked, agreement.seconds
    right = head[words[agreement.following]]  # a copy; row i makes the next word follow word i
    head[words[agreement.following[marked]]] = 0
    head[words[agreement.following[seconds]]] = np.float32(SECOND_LOGIT) * right[seconds]
    head[words[agreement.wrong[marked]]] += right[marked]
    return head


def draw_tensors(config: LlamaConfig, rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    """All tensors except the vocabulary projection."""
    tensors = {}
    for name, shape in network_of(config).tensors().items():
        if len(shape) == 1:
            tensors[name] = np.ones(shape, np.float32)
        elif name == EMBEDDING_WEIGHT:
            tensors[name] = rng.standard_normal(shape, np.float32)
            # Bytes and special tokens have the embeddings of words, so that a definite word follows them, too.
            tensors[name][:FIRST_WORD] = tensors[name][FIRST_WORD : 2 * FIRST_WORD]
        elif name != HEAD_WEIGHT:
            tensors[name] = rng.standard_normal(shape, np.float32) * np.float32(LAYER_SCALE / np.sqrt(shape[1]))
    return tensors


def generate_words() -> Iterator[tuple[str, str]]:
    """All words of two letters, then of three and so on, each as the two parts of its BPE merge."""
    stems = list(ascii_lowercase)
    while True:
        pairs = [(stem, letter) for stem in stems for letter in ascii_lowercase]
        yield from pairs
        stems = [stem + letter for stem, letter in pairs]


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE with exactly `vocab_size` entries: special tokens, bytes, words."""
    merges = list(islice(generate_words(), vocab_size - FIRST_WORD))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*SPECIAL_TOKENS, *letters, *(stem + letter for stem, letter in merges)]
    tokenizer = Tokenizer(models.BPE({entry: index for index, entry in enumerate(entries)}, merges))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_pair(size: PairSize, agreement: float, second: float, seed: int, output: Path) -> None:
    """Write `target`, `draft` and `prompts.jsonl` into a new folder, or nothing.

    Raises CheckpointError when `output` exists, ConfigError for shares outside of [0, 1].
    """
    if output.exists():
        raise CheckpointError(f"{output} exists: choose another --output, or remove it yourself")
    rng = np.random.default_rng(seed)
    table = Agreement(size.vocab_size, agreement, second, seed)
    tokenizer = make_tokenizer(size.vocab_size)
    with staging_folder(output, "pair.json", CheckpointError) as staging:
        for role, shape, head in (("target", size.target, make_target_head), ("draft", size.draft, make_draft_head)):
            fields = shape.fields(size.vocab_size)
            tensors = draw_tensors(LlamaConfig.from_hf(fields), rng)
            tensors[HEAD_WEIGHT] = head(tensors[EMBEDDING_WEIGHT], table)
            write_checkpoint(staging / role, fields, tensors, tokenizer)
        prompts = rng.choice(table.words, (NUM_PROMPTS, PROMPT_WORDS))
        lines = [json.dumps({"prompt": tokenizer.decode(prompt)}) + "\n" for prompt in prompts]
        (staging / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        settings = {"agreement": agreement, "second": second, "seed": seed}
        (staging / "pair.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def write_checkpoint(
    folder: Path, fields: dict[str, Any], tensors: dict[str, NDArray[np.float32]], tokenizer: Tokenizer
) -> None:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    unk, bos, eos = SPECIAL_TOKENS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unk,
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
    }
    generation = {"bos_token_id": fields["bos_token_id"], "eos_token_id": fields["eos_token_id"]}
    for name, content in (
        ("config.json", fields),
        ("tokenizer_config.json", settings),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--agreement", type=float, default=0.8, help="share of tokens both agree on (default 0.8)")
    parser.add_argument(
        "--second", type=float, default=0.5, help="share of the other tokens that are its second choice (default 0.5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed, another text (default 0)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    args = parser.parse_args()
    try:
        write_pair(SIZES[args.size], args.agreement, args.second, args.seed, args.output)
    except DraftwoodError as error:
        parser.error(str(error))
    Console().print(f"{args.output}: target, draft, prompts.jsonl", markup=False)


if __name__ == "__main__":
    main()
