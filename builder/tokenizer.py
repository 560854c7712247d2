"""Writes a checkpoint's tokenizer as `tokenizer.json` into the bundle: copied, or converted from SentencePiece's
format."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as TokenizerJson

from ..models.errors import BundleError, CheckpointError
from ..models.plain_files import MOST_JSON, MOST_TOKENIZER, check_plain
from ..runtime.text.tokenizer import SETTINGS, TEMPLATE, TOKENIZER, Tokenizer, read_settings, special_tokens

SENTENCEPIECE, ADDED = "tokenizer.model", "added_tokens.json"
TOKENIZER_FILES = (TOKENIZER, SENTENCEPIECE, SETTINGS, TEMPLATE, ADDED)  # that are read of a checkpoint
SPACE = "▁"  # SentencePiece's letter for a space
UNIGRAM, BPE = 1, 2  # sentencepiece_model.proto, TrainerSpec.ModelType
CONTROL, BYTE = 3, 6  # SentencePiece.Type


def convert_tokenizer(source: Path, destination: Path) -> Tokenizer:
    """Write a checkpoint's tokenizer into a folder, and open it there. Raises CheckpointError naming the fix."""
    try:
        for name in TOKENIZER_FILES:
            check_plain_file(source / name, MOST_TOKENIZER if name in (TOKENIZER, SENTENCEPIECE) else MOST_JSON)
        if (source / TOKENIZER).is_file():
            shutil.copyfile(source / TOKENIZER, destination / TOKENIZER)
        elif (source / SENTENCEPIECE).is_file():
            from_sentencepiece(source).save(str(destination / TOKENIZER))
        else:
            raise CheckpointError(
                f"{source} has neither {TOKENIZER} nor {SENTENCEPIECE}: copy the model's tokenizer beside its weights"
            )
        for name in (SETTINGS, TEMPLATE):
            if (source / name).is_file():
                shutil.copyfile(source / name, destination / name)
        return Tokenizer.load(destination)
    except BundleError as error:  # Tokenizer raises errors of bundles, but here the checkpoint is wrong
        raise CheckpointError(f"the tokenizer of {source} cannot be used: {error}") from error


def check_plain_file(file: Path, most: int) -> None:
    """Raises CheckpointError if `file` exists and is no plain file of at most `most` bytes."""
    try:
        check_plain(file, most)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not read: {error}; copy the model's own file there") from error


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raises CheckpointError unless every token has the same id on both sides."""
    ours, theirs = target.vocabulary(), draft.vocabulary()
    different = {token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token)}
    if different:
        example = min(different)
        raise CheckpointError(
            f"the vocabularies differ in {len(different)} tokens, for instance {example!r} is {ours.get(example)} for "
            f"the target and {theirs.get(example)} for the draft: choose a draft that shares the target's tokenizer"
        )


def from_sentencepiece(folder: Path) -> TokenizerJson:
    """LLaMA-1/2's tokenizer: BPE or unigram over raw text, with byte fallback, a leading space and a leading BOS."""
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString((folder / SENTENCEPIECE).read_bytes())
    except Exception as error:  # the module of protobuf's DecodeError depends on the release
        raise CheckpointError(f"{folder / SENTENCEPIECE} is no SentencePiece model: copy it again") from error
    if not proto.pieces:
        raise CheckpointError(f"{folder / SENTENCEPIECE} holds no tokens: copy it again")
    if proto.normalizer_spec.precompiled_charsmap or proto.trainer_spec.treat_whitespace_as_suffix:
        raise CheckpointError(
            f"{folder / SENTENCEPIECE} rewrites characters or spaces in a way this converter does not know: load the "
            f"folder with transformers' AutoTokenizer and save it with save_pretrained, which writes {TOKENIZER}"
        )
    tokenizer = TokenizerJson(model_of(proto, folder))
    prefix = proto.normalizer_spec.add_dummy_prefix
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefix else []
    if proto.normalizer_spec.remove_extra_whitespaces:
        steps = [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " "), *steps]
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if proto.trainer_spec.model_type == UNIGRAM:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", left=1)] if prefix else back)
    unknown = proto.pieces[proto.trainer_spec.unk_id].piece
    controls = [piece.piece for piece in proto.pieces if piece.type == CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in [unknown, *controls]])
    settings = read_settings(folder / SETTINGS)
    for index, token in sorted(added_tokens(folder, settings).items()):
        add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
        add([token])
        if tokenizer.token_to_id(token.content) != index:
            raise CheckpointError(
                f"{folder}: the added token {token.content!r} has id {index}, but {SENTENCEPIECE} has "
                f"{len(proto.pieces)} pieces: the two files belong to different models, copy both again"
            )
    bos = special_tokens(settings).get("bos_token", "<s>")
    if settings.get("add_bos_token", True) and tokenizer.token_to_id(bos) is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def added_tokens(folder: Path, settings: dict[str, Any]) -> dict[int, AddedToken]:
    """Tokens that were added after the training of the SentencePiece model, by id; one of two files lists them."""
    try:
        found = {
            int(index): AddedToken(text, normalized=False, special=False)
            for text, index in read_settings(folder / ADDED).items()
        }
        for index, fields in settings.get("added_tokens_decoder", {}).items():
            special = bool(fields.get("special", False))
            found[int(index)] = AddedToken(fields["content"], normalized=False, special=special)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, BundleError):
            raise
        raise CheckpointError(f"{folder}: the list of added tokens is damaged ({error!r}): copy it again") from error
    return found


def model_of(proto: Any, folder: Path) -> models.Model:
    """A model of the tokenizers library with the pieces and their scores."""
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    unknown, fallback = proto.trainer_spec.unk_id, any(piece.type == BYTE for piece in proto.pieces)
    if proto.trainer_spec.model_type == UNIGRAM:
        return models.Unigram(pieces, unk_id=unknown, byte_fallback=fallback)
    if proto.trainer_spec.model_type != BPE:
        raise CheckpointError(f"{folder / SENTENCEPIECE} is neither a BPE nor a unigram model; no LLaMA uses another")
    vocabulary = {piece: index for index, (piece, _) in enumerate(pieces)}
    # A piece is the merge of every pair of pieces that it consists of. Merges with better scores come first.
    merges = []
    for piece, score in pieces:
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [split for split in splits if split[0] in vocabulary and split[1] in vocabulary]
        known.sort(key=lambda split: (vocabulary[split[0]], vocabulary[split[1]]))
        merges += [(score, split) for split in known]
    merges.sort(key=lambda merge: -merge[0])
    return models.BPE(
        vocabulary,
        [split for _, split in merges],
        unk_token=pieces[unknown][0],
        fuse_unk=True,
        byte_fallback=fallback,
    )
