"""The executor of PTX notices what a GPU may punish only sometimes: each fault in a small kernel of its own."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.typing import NDArray
from ptx.execution import Launch
from ptx.grid import parameter_bytes, run_grid
from ptx.memory import GlobalMemory
from ptx.parser import Divergent, Fault, InFlight, Misaligned, OutOfBounds, Race, Undefined, parse

THREADS = 64
KERNEL = """
.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(.param .u64 input, .param .u64 output)
{
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<20>; .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [input];
    ld.param.b64 %rd2, [output];
    mov.u32 %r1, %tid.x;           // the thread, its words in all three memories
    shl.b32 %r2, %r1, 2;
    cvt.u64.u32 %rd3, %r2;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    mov.u32 %r3, global_smem;
    add.s32 %r4, %r3, %r2;
    xor.b32 %r5, %r4, 128;        // the same word of the other warp
    BODY
    ret;
}
"""
# Each warp gets the other's words: by way of shared memory, by an asynchronous copy, and by turns of one word.
EXCHANGE = """
    ld.global.b32 {%r6}, [%rd4];
    st.shared.b32 [%r4], %r6;
    bar.sync 0;
    ld.shared.b32 %r7, [%r5];
    st.global.b32 [%rd5], %r7;
"""
COPY = """
    cp.async.ca.shared.global [%r4], [%rd4], 4, 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    ld.shared.b32 %r7, [%r5];
    st.global.b32 [%rd5], %r7;
"""
TURNS = """
    setp.lt.s32 %p1, %r1, 32;
    @%p1 bra $FIRST;
    ld.global.b32 %r7, [%rd4+-128];
    bra.uni $END;
$FIRST:
    ld.global.b32 %r7, [%rd4+128];
$END:
    bar.sync 0;
    st.global.b32 [%rd5], %r7;
"""
# Neighbours in a warp exchange words, read both, and write others to their places.
NEIGHBOURS = """
    ld.global.b32 {%r6}, [%rd4];
    xor.b32 %r5, %r4, 4;
    st.shared.b32 [%r4], %r6;
    bar.warp.sync -1;
    ld.shared.b32 %r7, [%r5];
    ld.shared.b32 %r8, [%r4];
    bar.warp.sync -1; // before the next write
    st.shared.b32 [%r4], %r1;
    st.global.b32 [%rd5], %r7;
"""
# The largest of a warp's numbers: thread - 40, in the second warp also NaN; without a positive one in the first.
LARGEST = """
    cvt.rn.f32.s32 %r6, %r1;
    add.f32 %r6, %r6, 0fC2200000;
    setp.eq.s32 %p1, %r1, 63;
    selp.b32 %r6, 0x7FC00000, %r6, %p1;
    mov.b32 %r8, -1;
    redux.sync.max.f32 %r7, %r6, %r8;
    st.global.b32 [%rd5], %r7;
"""
EXCHANGED = [*range(32, 64), *range(32)]
BODIES = {EXCHANGE: EXCHANGED, COPY: EXCHANGED, TURNS: EXCHANGED, NEIGHBOURS: [word ^ 1 for word in range(64)]}


def run(body: str) -> NDArray[np.uint32]:
    program, memory = parse(KERNEL.replace("BODY", body)), GlobalMemory(1 << 14)
    words = np.arange(THREADS, dtype=np.uint32)
    output = memory.reserve("the output", words.nbytes)
    addresses = (np.uint64(each).tobytes() for each in (memory.put("the input", words), output))
    run_grid(program, Launch((1, 1, 1), THREADS, 4 * THREADS, parameter_bytes(program, addresses)), memory)
    return memory.get(output, words.nbytes).view(np.uint32)


@pytest.mark.parametrize("body", BODIES)
def test_kernels_without_fault(body: str) -> None:
    assert run(body).tolist() == BODIES[body]


FAULTS: dict[str, tuple[str, str, str, type[Fault], str]] = {
    "a barrier is missing": (EXCHANGE, "bar.sync 0;", "", Race, "wrote what this reads"),
    "a barrier of a warp does not order two warps": (EXCHANGE, "bar.sync 0", "bar.warp.sync -1", Race, "wrote what"),
    "a warp's barrier is missing": (NEIGHBOURS, "bar.warp.sync -1;", "", Race, "wrote what this reads"),
    "a warp's barrier is missing before the next write": (
        NEIGHBOURS,
        "bar.warp.sync -1; // before the next write",
        "",
        Race,
        "reads what this writes",
    ),
    "a barrier is missing before the next write": (
        EXCHANGE,
        "st.global",
        "st.shared.b32 [%r4], %r1; st.global",
        Race,
        "reads what this writes",
    ),
    "all write different values to one word": (EXCHANGE, "[%r4], %r6", "[%r3], %r6", Race, "different values"),
    "a wait is missing": (COPY, "cp.async.wait_group 0;", "", InFlight, "nobody awaited"),
    "a wait leaves a group": (COPY, "wait_group 0", "wait_group 1", InFlight, "nobody awaited"),
    "a commit comes too late": (COPY, "cp.async.commit_group;", "", InFlight, "nobody awaited"),
    "a barrier is missing after a wait": (COPY, "bar.sync 0;", "", Race, "wrote what this reads"),
    "a copy overwrites what others read": (
        COPY,
        "st.global",
        "cp.async.ca.shared.global [%r4], [%rd4], 4, 4; st.global",
        Race,
        "reads what this copies to",
    ),
    "a read after the input": (EXCHANGE, "[%rd4]", "[%rd4+4]", OutOfBounds, "byte 256 of the input, which has 256"),
    "a read before the input": (EXCHANGE, "[%rd4]", "[%rd4+-4]", OutOfBounds, "reads 4 bytes"),
    "a write to the input": (EXCHANGE, "[%rd5]", "[%rd4]", OutOfBounds, "writes 4 bytes at byte 0 of the input"),
    "beyond shared memory": (EXCHANGE, "[%r4]", "[%r4+4]", OutOfBounds, "byte 256 of 256 of shared memory"),
    "a misaligned read": (EXCHANGE, "[%rd4]", "[%rd4+2]", Misaligned, "is no multiple of 4"),
    "a misaligned write": (EXCHANGE, "[%r4]", "[%r4+1]", Misaligned, "is no multiple of 4"),
    "a barrier in one branch": (TURNS, "bra.uni $END;", "bar.sync 0; bra.uni $END;", Divergent, "only some of 64"),
    "threads that skip a barrier": (TURNS, "bar.sync 0;", "@%p1 bar.sync 0;", Divergent, "only some of 64 threads"),
    "half a warp exchanges": (
        TURNS,
        "bar.sync 0;",
        "setp.lt.s32 %p2, %r1, 16; @%p2 shfl.sync.bfly.b32 %r7, %r7, 1, 31, -1;",
        Divergent,
        "only some of 32 threads",
    ),
    "a register without a value": (EXCHANGE, "[%rd5], %r7", "[%rd5], %r8", Undefined, "%r8 was never written"),
    "an instruction from elsewhere": (EXCHANGE, "bar.sync 0", "bar.arrive 0, 64", Undefined, "no barrier that the"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str) -> None:
    body, before, after, fault, message = FAULTS[name]
    assert before in body
    with pytest.raises(fault, match=re.escape(message)):
        run(body.replace(before, after, 1))


def test_reductions_of_floats_order_signs_and_leave_nan_out() -> None:
    assert run(LARGEST).view(np.float32).tolist() == [31 - 40] * 32 + [62 - 40] * 32
    with pytest.raises(Undefined, match="no reduction that the executor knows"):
        run(LARGEST.replace("redux.sync.max", "redux.sync.add"))


def test_bytes_that_nobody_wrote_are_nan() -> None:
    words = run("ld.shared.b32 %r7, [%r4]; st.global.b32 [%rd5], %r7;")
    assert np.isnan(words.view(np.float32)).all()
