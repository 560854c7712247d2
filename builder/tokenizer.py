"""Writes a checkpoint's `tokenizer.json` into the bundle: copied, or converted from SentencePiece's format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerJson

from ..models.errors import BundleError, CheckpointError, ConfigError, shown
from ..models.plain_files import MAX_JSON, MAX_TOKENIZER, check_plain, parse_object, read_plain
from ..runtime.text.tokenizer import (
    DEFAULT,
    SETTINGS,
    TEMPLATE,
    TOKENIZER,
    Tokenizer,
    read_settings,
    read_templates,
    special_tokens,
)
from .sentencepiece import put_around, read_sentencepiece, tokenizer_of

SENTENCEPIECE, ADDED = "tokenizer.model", "added_tokens.json"
TOKENIZER_FILES = (TOKENIZER, SENTENCEPIECE, SETTINGS, TEMPLATE, ADDED)  # that are read of a checkpoint
TEMPLATES, MAX_TEMPLATES = "additional_chat_templates", 16  # a folder of templates by name, and its most files


def convert_tokenizer(source: Path, destination: Path) -> Tokenizer:
    """Write a checkpoint's tokenizer into a folder, and open it there. Raises CheckpointError naming the fix."""
    try:
        for name in TOKENIZER_FILES:
            check_plain_file(source / name, MAX_TOKENIZER if name == TOKENIZER else MAX_JSON)
        if (source / TOKENIZER).is_file():
            copy_with_added(source, destination)
        elif (source / SENTENCEPIECE).is_file():
            from_sentencepiece(source).save(str(destination / TOKENIZER))
        else:
            raise CheckpointError(
                f"{source} has neither {TOKENIZER} nor {SENTENCEPIECE}: copy the model's tokenizer beside its weights"
            )
        for name in (SETTINGS, TEMPLATE):
            if (source / name).is_file():
                shutil.copyfile(source / name, destination / name)
        if files := additional_templates(source):
            templates = read_templates(source) if (source / TEMPLATE).is_file() else {}
            write_templates(templates | {file.stem: file.read_text(encoding="utf-8") for file in files}, destination)
        return Tokenizer.load(destination)
    except BundleError as error:  # Tokenizer raises errors of bundles, but here the checkpoint is wrong
        raise CheckpointError(f"the tokenizer of {source} cannot be used: {error}") from error


def copy_with_added(source: Path, destination: Path) -> None:
    """Copy tokenizer.json with the added tokens that only the files beside it list, as transformers adds them."""
    shutil.copyfile(source / TOKENIZER, destination / TOKENIZER)
    settings = read_settings(source / SETTINGS)
    listed = [*sorted(added_tokens(source, settings).items()), *((None, token) for token in named_tokens(settings))]
    if not listed:
        return
    try:
        content = parse_object(read_plain(source / TOKENIZER, MAX_TOKENIZER), strict=True)
        vocabulary, added = content["model"]["vocab"], content["added_tokens"]
        known = vocabulary if isinstance(vocabulary, dict) else {text: at for at, (text, _) in enumerate(vocabulary)}
        there, count = {entry["content"] for entry in added}, len(added)
        last = max((*known.values(), *(entry["id"] for entry in added)), default=-1)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{source / TOKENIZER} is not readable ({error!r}): copy it again") from error
    for index, token in listed:
        if token.content in there:
            continue
        own = known.get(token.content, last + 1)
        if index not in (None, own):
            raise other_model(source, token.content, index, f"would have {own} after those of {TOKENIZER}")
        flags = {name: getattr(token, name) for name in ("lstrip", "normalized", "rstrip", "single_word", "special")}
        added.append({"id": own, "content": token.content, **flags})
        there.add(token.content)
        last = max(last, own)
    if len(added) > count:
        (destination / TOKENIZER).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def named_tokens(settings: Mapping[str, Any]) -> Iterator[AddedToken]:
    """The special tokens that tokenizer_config.json lists by name, or without one, beyond the usual four."""
    for name in ("extra_special_tokens", "additional_special_tokens"):
        listed = settings.get(name) or ()
        for token in listed.values() if isinstance(listed, dict) else listed:
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str) and text:
                yield AddedToken(text, normalized=False, special=True)


def other_model(folder: Path, text: str, index: int | None, found: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: the added token {text!r} has id {index}, but {found}: the two files belong to different models, "
        "copy both again"
    )


def additional_templates(source: Path) -> list[Path]:
    files = sorted((source / TEMPLATES).glob("*.jinja"))
    if len(files) > MAX_TEMPLATES:
        raise CheckpointError(f"{source / TEMPLATES} has {len(files)} chat templates and may have {MAX_TEMPLATES}")
    for file in files:
        check_plain_file(file, MAX_JSON)
    return files


def write_templates(templates: Mapping[str, str], folder: Path) -> None:
    """Write the chat templates of a bundle: one as a file, several by name into the settings of the tokenizer."""
    if set(templates) == {DEFAULT}:
        (folder / TEMPLATE).write_text(templates[DEFAULT], encoding="utf-8", newline="")
        return
    listed = [{"name": name, "template": template} for name, template in templates.items()]
    content = json.dumps({**read_settings(folder / SETTINGS), "chat_template": listed}, indent=2)
    (folder / SETTINGS).write_text(content + "\n", encoding="utf-8")
    (folder / TEMPLATE).unlink(missing_ok=True)


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


def check_rows(source: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises CheckpointError if an ordinary token has no row in the model's embedding. Added tokens may have none: some
    models were published with tokens that they were never trained on (CodeLlama-34b has four), and no text holds one of
    these by accident."""
    last = max(set(tokenizer.vocabulary().values()) - tokenizer.added_token_ids, default=0)
    if last >= vocab_size:
        raise CheckpointError(
            f"{source}: its tokenizer has a token {last}, and the model has {vocab_size} tokens: they belong to "
            "different models, copy the model's own tokenizer there"
        )


def check_known(ids: Iterable[int], tokenizer: Tokenizer, vocab_size: int, text: str) -> None:
    """Raises ConfigError if a text has a token without a row in the model's embedding. text: what the text is."""
    if (unknown := max(ids, default=0)) >= vocab_size:
        raise ConfigError(
            f"{text} holds {shown(tokenizer.decode([unknown], skip_special_tokens=False))}, which is token {unknown}, "
            f"and the model has {vocab_size} tokens: remove it"
        )


def from_sentencepiece(folder: Path) -> TokenizerJson:
    """LLaMA-1/2's tokenizer.model with the tokens added to it, and with transformers' settings that change tokens."""
    settings = read_settings(folder / SETTINGS)
    prefix, legacy = switched(settings, "add_prefix_space", True), switched(settings, "legacy", True)
    model = read_sentencepiece(folder / SENTENCEPIECE)
    tokenizer = tokenizer_of(model._replace(prefix=model.prefix and prefix, once=not legacy))
    added = added_tokens(folder, settings)
    # Together: each call takes a time that grows with the number of all.
    tokenizer.add_tokens([added[index] for index in sorted(added)])
    for index, token in sorted(added.items()):
        if tokenizer.token_to_id(token.content) != index:
            raise other_model(folder, token.content, index, f"{SENTENCEPIECE} has {len(model.pieces)} pieces")
    special, around = special_tokens(settings), dict[str, str | None]()
    for name, default, wanted in (("bos", "<s>", True), ("eos", "</s>", False)):
        text = special.get(f"{name}_token", default)
        known = tokenizer.token_to_id(text) is not None and switched(settings, f"add_{name}_token", wanted)
        around[name] = text if known else None
    put_around(tokenizer, around["bos"], around["eos"])
    return tokenizer


def switched(settings: Mapping[str, Any], name: str, otherwise: bool) -> bool:
    """A setting of tokenizer_config.json; where it is absent or null, what transformers takes."""
    value = settings.get(name)
    return otherwise if value is None else bool(value)


def added_tokens(folder: Path, settings: dict[str, Any]) -> dict[int, AddedToken]:
    """Tokens that were added after the tokenizer's training, by id; one of two files lists them."""
    try:
        found = {
            int(index): AddedToken(text, normalized=False, special=False)
            for text, index in read_settings(folder / ADDED).items()
        }
        for index, fields in settings.get("added_tokens_decoder", {}).items():
            flags = {name: bool(fields.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
            found[int(index)] = AddedToken(fields["content"], normalized=False, **flags)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, BundleError):
            raise
        raise CheckpointError(f"{folder}: the list of added tokens is damaged ({error!r}): copy it again") from error
    return found
