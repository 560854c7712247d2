"""JsonGuard by itself: it forbids the tokens that break a rule, and no others, whatever a vocabulary holds."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftwood.runtime.structured.json_guard import ANY_VALUE, NUMBER, JsonGuard, State, Tokens

LETTERS = [bytes([byte]) for byte in b'{}[]:,"\\ab u016f17.-e \n']
LONG = [
    *(b'"a"', b'"a":', b'","a"', b'{"a":1,"a"', b'{"a"', b'},"a"', b'"},"a":', b'"a","a"', b'a"', b'b":{},"a"', b'""'),
    *(
        b'"b":"',
        b'",',
        b"\\\\",
        b'\\"',
        b'\\\\"',
        b'x\\"a"',
        b"\\u00",
        b"\\u0061",
        b"\\u001f",
        b'"\\u0061',
        b"\\n",
        b'"\\',
    ),
    *(b"u007f", b"\\u007f", b"\x7f", "é".encode(), b"\xc3", b"<call>", b'<call>{"', b"12", b"1.5", b"000", b"12345"),
    *(b'{"', b'[{"a":"', b'{"a":{', b'{"a":1,"', b'":1,"', b'"a":[{"b":1},'),
]
TOKENS = Tokens([*LETTERS, *LONG])
GUARDS = [
    JsonGuard(TOKENS),
    JsonGuard(TOKENS, b"", b"<call>"),
    JsonGuard(TOKENS, b"{"),
    JsonGuard(TOKENS, ANY_VALUE, b"<call>"),
]


@settings(max_examples=300)
@given(
    guard=st.sampled_from(GUARDS),
    opened=st.sampled_from([b'{"', b"<call>", b'[{"a":"', b'{"a":{']),
    walk=st.lists(st.integers(0, len(TOKENS.texts) - 1), max_size=25),
)
@example(GUARDS[0], b'{"', [TOKENS.texts.index(each) for each in (b"\xc3", b"\\u007f", b'"')])  # half a character
def test_what_is_forbidden_is_what_breaks_a_rule(guard: JsonGuard, opened: bytes, walk: list[int]) -> None:
    state: State = guard.start()
    for token in [TOKENS.texts.index(opened), *walk]:
        mask = np.ones(len(TOKENS.texts) + 3, np.bool_)  # a model may have more rows than tokens
        guard.forbid(state, mask)
        expected = [guard.push(state, each) is not None for each in range(len(TOKENS.texts))]
        if state.kind == NUMBER:  # in which a token may also be forbidden for its digits
            expected = [each and not guard.is_long(state, token) for token, each in enumerate(expected)]
        assert mask.tolist() == [*expected, True, True, True]
        state = guard.push(state, token) or state
