"""SentencePiece models, of whichever file, as tokenizers of the tokenizers library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as TokenizerJson

from ..models.errors import CheckpointError
from ..models.fields import MOST
from ..runtime.text.tokenizer_check import UNIGRAM_BYTES, VOCABULARY_BYTES, text_problems

SPACE = "▁"  # SentencePiece writes a space as this letter
UNIGRAM, BPE = 1, 2  # sentencepiece_model.proto, TrainerSpec.ModelType
CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # SentencePiece.Type
MAX_MERGED = 1 << 24  # characters that all merges lead to; those of 262,144 pieces lead to 4 million


class Piece(NamedTuple):
    """kind: a SentencePiece.Type."""

    text: str
    score: float
    kind: int


class Pieces(NamedTuple):
    pieces: Sequence[Piece]
    unknown: int  # index of the piece that stands for what has none
    unigram: bool = False
    prefix: bool = True  # a space is put in front of a text, and of what follows a special token
    strip: bool = False  # of spaces that follow each other one is kept, and none at both ends
    once: bool = False  # the prefix is put in front of a text alone


def read_sentencepiece(file: Path) -> Pieces:
    """A `tokenizer.model`. Raises CheckpointError."""
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(file.read_bytes())
    except Exception as error:  # protobuf's DecodeError moves between its releases
        raise CheckpointError(f"{file} is no SentencePiece model: copy it again") from error
    if not proto.pieces:
        raise CheckpointError(f"{file} holds no tokens: copy it again")
    if len(proto.pieces) > MOST["vocab_size"]:
        raise CheckpointError(f"{file} holds {len(proto.pieces)} tokens, more than any model has: copy it again")
    if proto.normalizer_spec.precompiled_charsmap or proto.trainer_spec.treat_whitespace_as_suffix:
        raise CheckpointError(
            f"{file} rewrites characters or spaces in a way this converter does not know: load the "
            "folder with transformers' AutoTokenizer and save it with save_pretrained, which writes tokenizer.json"
        )
    if proto.trainer_spec.model_type not in (UNIGRAM, BPE):
        raise CheckpointError(f"{file} is neither a BPE nor a unigram model; no LLaMA uses another")
    unknown = proto.trainer_spec.unk_id
    if not 0 <= unknown < len(proto.pieces):
        raise CheckpointError(f"{file}: its unk_id {unknown} is none of its {len(proto.pieces)} tokens: copy it again")
    return Pieces(
        [Piece(piece.piece, piece.score, piece.type) for piece in proto.pieces],
        unknown,
        proto.trainer_spec.model_type == UNIGRAM,
        proto.normalizer_spec.add_dummy_prefix,
        proto.normalizer_spec.remove_extra_whitespaces,
    )


def tokenizer_of(model: Pieces) -> TokenizerJson:
    """LLaMA-1/2's tokenizer: BPE or unigram over raw text with byte fallback. Control pieces are special tokens.

    A piece that a user defined is never cut. A unigram model sees to that by the scores. Of BPE, where no merges may
    lead to them, such pieces become added tokens. Raises CheckpointError for pieces that no training wrote."""
    most = UNIGRAM_BYTES if model.unigram else VOCABULARY_BYTES
    for problem in text_problems([piece.text for piece in model.pieces], most):
        raise CheckpointError(f"the vocabulary cannot be used: {problem}")
    tokenizer = TokenizerJson(unigram_model(model) if model.unigram else bpe_model(model))
    first = model.prefix and model.once
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if model.prefix and not first else []
    if model.strip:
        # In this order each takes a time that grows with the text: at the end, " +" tries every run from each blank.
        steps = [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"\A | \z"), ""), *steps]
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if model.unigram or first:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first" if first else "never", split=False)
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", left=1)] if model.prefix else back)
    controls = [piece.text for piece in model.pieces if piece.kind == CONTROL]
    special = [model.pieces[model.unknown].text, *controls]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    whole = [] if model.unigram else [piece.text for piece in model.pieces if piece.kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in whole])
    return tokenizer


def put_around(tokenizer: TokenizerJson, before: str | None, after: str | None) -> None:
    pieces = [*([before] if before is not None else []), "$A", *([after] if after is not None else [])]
    special = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys(pieces) if text != "$A"]
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=special)


def has_bytes(model: Pieces) -> bool:
    """Whether there are pieces for single bytes, which stand for what has no other."""
    return any(piece.kind == BYTE for piece in model.pieces)


def unigram_model(model: Pieces) -> models.Model:
    scores = [(piece.text, piece.score) for piece in model.pieces]
    return models.Unigram(scores, unk_id=model.unknown, byte_fallback=has_bytes(model))


def bpe_model(model: Pieces) -> models.Model:
    """A piece is the merge of any two pieces; better scores merge first. Raises CheckpointError for too many merges."""
    vocabulary = {piece.text: index for index, piece in enumerate(model.pieces)}
    merges, merged = list[tuple[float, tuple[int, int]]](), 0
    for text, score, _ in model.pieces:
        splits = ((vocabulary.get(text[:cut]), vocabulary.get(text[cut:])) for cut in range(1, len(text)))
        known = sorted((first, second) for first, second in splits if first is not None and second is not None)
        merges += [(score, split) for split in known]
        if (merged := merged + len(known) * len(text)) > MAX_MERGED:
            raise CheckpointError(
                f"the tokens of the vocabulary can be cut in too many ways, into more than {MAX_MERGED} characters: "
                "copy the model's own tokenizer"
            )
    merges.sort(key=lambda merge: -merge[0])
    return models.BPE(
        vocabulary,
        [(model.pieces[first].text, model.pieces[second].text) for _, (first, second) in merges],
        unk_token=model.pieces[model.unknown].text,
        fuse_unk=True,
        byte_fallback=has_bytes(model),
    )
