"""GGUF files of strangers: whatever their bytes say, they are refused at once, with a message and little memory."""

from __future__ import annotations

import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import write_checkpoint, write_tokenizer
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.gguf.header import MAX_ELEMENTS, MAX_ENTRIES, read_header
from draftwood.models.errors import CheckpointError
from draftwood.models.layers import network_of

UINT32, STRING, ARRAY = 4, 8, 9
HUGE = 1 << 60


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file that is read, in which a change shows."""
    folder = write_checkpoint(tmp_path_factory.mktemp("good") / "folder", num_hidden_layers=1)
    write_tokenizer(folder)
    return write_gguf(folder, folder / "model.gguf", Kind.Q8_0).read_bytes()


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, content: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + content


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


def tensor(name: str, shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def header(entries: list[bytes], tensors: list[bytes], counts: tuple[int, int] | None = None) -> bytes:
    """counts: of tensors and entries, if not what is there."""
    return b"GGUF" + struct.pack("<IQQ", 3, *(counts or (len(tensors), len(entries)))) + b"".join(entries + tensors)


def filled(content: bytes, data: int = 64) -> bytes:
    return content + bytes(-len(content) % 32 + data)


BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "begins with b'' and is no GGUF file"),
    "half a magic": (b"GG", "is no GGUF file"),
    "a pickle": (b"\x80\x04K\x01.", "is no GGUF file"),
    "a page": (b"version https://git-lfs.github.com/spec/v1\n", "is no GGUF file"),
    "only a magic": (b"GGUF", "cut off"),
    "version 1": (b"GGUF" + struct.pack("<III", 1, 0, 0), "has version 1 of GGUF, and only 2 and 3 are read"),
    "version 4": (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "has version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian, and only little-endian"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), "cut off"),
    "2^60 tensors": (header([], [], (HUGE, 0)), f"claims {HUGE} tensors, more than {MAX_ENTRIES}"),
    "2^60 entries": (header([], [], (0, HUGE)), f"claims {HUGE} entries, more than {MAX_ENTRIES}"),
    "more entries than bytes": (header([], [], (0, 1000)), "cut off: it claims 1000 entries"),
    "more tensors than bytes": (header([], [], (1000, 0)), "cut off: it claims 1000 tensors"),
    "a key of 2^60 bytes": (header([struct.pack("<Q", HUGE)], [], (0, 1)) + bytes(32), "cut off"),
    "a text of 2^60 bytes": (header([entry("a", STRING, struct.pack("<Q", HUGE))], []) + bytes(32), "cut off"),
    "2^60 texts": (header([entry("a", ARRAY, array(STRING, HUGE))], []) + bytes(32), f"more than {MAX_ELEMENTS}"),
    "2^60 numbers": (header([entry("a", ARRAY, array(UINT32, HUGE))], []) + bytes(32), f"more than {MAX_ELEMENTS}"),
    "a million texts": (header([entry("a", ARRAY, array(STRING, 10**6))], []) + bytes(32), "claims 1000000 strings"),
    "a million numbers": (header([entry("a", ARRAY, array(UINT32, 10**6))], []) + bytes(32), "cut off"),
    "nested arrays": (header([entry("a", ARRAY, array(ARRAY, 1, array(UINT32, 0)))], []), "arrays of arrays"),
    "an unknown type": (header([entry("a", 13, bytes(8))], []), "'a' is of type 13, which GGUF does not have"),
    "an array of an unknown type": (header([entry("a", ARRAY, array(99, 1, bytes(8)))], []), "type 99"),
    "a boolean of 2": (header([entry("a", 7, b"\2")], []) + bytes(32), "neither true nor false"),
    "a key that is no text": (header([struct.pack("<Q", 1) + b"\xff" + bytes(20)], []), "is no UTF-8"),
    "a key twice": (header([entry("a", UINT32, bytes(4))] * 2, []), "the key 'a' stands in it twice"),
    "alignment 0": (header([entry("general.alignment", UINT32, bytes(4))], []), "alignment is 0, no power of two"),
    "alignment 3": (header([entry("general.alignment", UINT32, b"\3\0\0\0")], []), "alignment is 3, no power"),
    "alignment 2^31": (header([entry("general.alignment", UINT32, b"\0\0\0\x80")], []), "no power of two up to"),
    "alignment of a text": (header([entry("general.alignment", STRING, text("32"))], []), "alignment is '32'"),
    "no dimensions": (filled(header([], [tensor("t", ())])), "has 0 dimensions, not 1 to 4"),
    "2^31 dimensions": (header([], [text("t") + struct.pack("<I", 1 << 31)], (1, 0)) + bytes(32), "dimensions"),
    "five dimensions": (filled(header([], [tensor("t", (1,) * 5)])), "has 5 dimensions"),
    "a dimension of 0": (filled(header([], [tensor("t", (8, 0))])), r"has the shape \(0, 8\)"),
    "2^120 numbers": (filled(header([], [tensor("t", (HUGE, HUGE))])), "has the shape"),
    "2^64 - 1 numbers": (filled(header([], [tensor("t", ((1 << 64) - 1,))])), "has the shape"),
    "a broken block": (filled(header([], [tensor("t", (33,), Kind.Q8_0)])), "have 33 numbers, no multiple of .* 32"),
    "beyond the end": (filled(header([], [tensor("t", (17,))])), "cut off: the tensor 't' ends at"),
    "an offset beyond": (filled(header([], [tensor("t", offset=1 << 40)])), "cut off: the tensor 't' ends at"),
    "an offset of 2^64 - 32": (filled(header([], [tensor("t", offset=(1 << 64) - 32)])), "cut off"),
    "an odd offset": (filled(header([], [tensor("t", offset=4)])), "offset that is no multiple of 32"),
    "overlapping": (filled(header([], [tensor("t", (16,)), tensor("u", offset=32)])), "'u' lies in another one"),
    "a name twice": (filled(header([], [tensor("t"), tensor("t", offset=32)])), "the tensor 't' stands in it twice"),
    "no architecture": (header([], []), "lacks general.architecture"),
    "hidden characters": (header([entry("\x1b[2J" * 100, 13, b"")], []), r"is of type 13"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused(kind: str, tmp_path: Path) -> None:
    content, message = BAD[kind]
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(file)
    assert len(str(caught.value)) < 600 and str(caught.value).isprintable()


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda file: None, "is missing: give the path"),
    "pipe": (os.mkfifo, "is no plain file"),
    "folder": (Path.mkdir, "is missing"),
    "device": (lambda file: file.symlink_to("/dev/zero"), "is no plain file"),
    "link to itself": (lambda file: file.symlink_to(file.name), "is not read"),
    "link to nothing": (lambda file: file.symlink_to("nowhere"), "is missing"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_plain_file_is_refused(kind: str, tmp_path: Path) -> None:
    make, message = ODD[kind]
    make(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path / "model.gguf")


def read_all(file: Path) -> None:
    """Everything a build reads of a file."""
    checkpoint = Checkpoint(file)
    for name in network_of(checkpoint.config).tensors():
        checkpoint.tensor(name)
    checkpoint.eos_token_ids()
    checkpoint.write_tokenizer(file.parent)


def test_a_file_cut_off_anywhere_is_refused_and_links_to_one_are_followed(good: bytes, tmp_path: Path) -> None:
    """Every file of a hub's cache is a link."""
    file, link = tmp_path / "model.gguf", tmp_path / "link.gguf"
    file.write_bytes(good)
    link.symlink_to(file.name)
    assert Checkpoint(link).config.num_layers == 1
    for end in [*range(0, 2000, 37), *np.linspace(2000, len(good) - 1, 60).astype(int).tolist()]:
        file.write_bytes(good[:end])
        with pytest.raises(CheckpointError, match=r"cut off|no GGUF file"):
            Checkpoint(file)


@settings(max_examples=300)
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(data: st.DataObject, good: bytes, tmp_path_factory: Any) -> None:
    """No other error than CheckpointError, whichever bytes of the header change."""
    file = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    content = bytearray(good)
    begin = good.index(b"tokenizer.ggml.tokens"), good.index(b"token_embd")
    for _ in range(data.draw(st.integers(1, 3))):
        ranges = ((0, begin[0]), (begin[1], begin[1] + 1500), (0, len(good) - 8))
        place = data.draw(st.one_of(*(st.integers(*each) for each in ranges)))
        change = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, bytes(8)])))
        content[place : place + len(change)] = change
    file.write_bytes(content)
    try:
        read_all(file)
    except CheckpointError as error:
        assert str(error)


def test_a_file_that_shrinks_after_it_was_opened_is_refused(good: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(good)
    checkpoint = Checkpoint(file)
    os.truncate(file, len(good) // 2)
    with pytest.raises(CheckpointError, match="leave it alone during a build"):
        for name in network_of(checkpoint.config).tensors():
            checkpoint.tensor(name)


def test_damaged_scales_are_refused(good: bytes, tmp_path: Path) -> None:
    """A block whose scale is NaN."""
    file = tmp_path / "model.gguf"
    file.write_bytes(good)
    place = read_header(file).tensors["blk.0.attn_k.weight"].begin
    content = bytearray(good)
    content[place : place + 2] = np.float16("nan").tobytes()
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"k_proj.weight holds NaN or infinity"):
        Checkpoint(file).tensor("model.layers.0.self_attn.k_proj.weight")


def test_a_chat_template_that_never_ends_is_no_part_of_a_build(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "folder", num_hidden_layers=1)
    write_tokenizer(folder)

    def with_template(template: str) -> Path:
        return write_gguf(folder, tmp_path / "model.gguf", edit=lambda writer: writer.add_chat_template(template))

    endless = "{% for i in range(10**9) %}{% for i in range(10**9) %}x{% endfor %}{% endfor %}"
    Checkpoint(with_template(endless)).write_tokenizer(tmp_path).close()
    with pytest.raises(CheckpointError, match="its chat template has 2000000 characters"):
        Checkpoint(with_template("x" * 2_000_000)).write_tokenizer(tmp_path)


def test_the_longest_header_costs_little_memory(tmp_path: Path) -> None:
    """As many empty texts as may be."""
    file = tmp_path / "model.gguf"
    content = header([entry("a", ARRAY, array(STRING, MAX_ELEMENTS))], [])
    with file.open("wb") as handle:
        handle.write(content)
        handle.truncate(len(content) + 8 * MAX_ELEMENTS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(read_header(file).metadata["a"]) == MAX_ELEMENTS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


def test_a_type_that_the_gguf_package_only_names_has_a_size() -> None:
    """Every type that could be read has a block size, from which a tensor's bytes follow."""
    assert all(kind in gguf.GGML_QUANT_SIZES for kind in Kind)
