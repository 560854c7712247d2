"""The grammar of an answer with tools: which texts it takes, by the choice and the model's way of writing calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerJson

from draftwood.models.errors import RequestError
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.structured import StructuredOutput
from draftwood.runtime.serving.openai.tool_use import (
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
    tool_use,
)
from draftwood.runtime.structured.grammars import Grammars
from draftwood.runtime.text.tokenizer import Tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/C"}},
    "required": ["city"],
    "$defs": {"C": {"enum": ["Bern", "Oslo"]}},
    "additionalProperties": False,
}
FORM = StructuredOutput(json={"enum": [["a"]]})
TEMPLATES = {"hermes": "tools in <tool_call> tags", "llama": "tools: ipython", "unknown": "tools"}


def tools(strict: bool = False) -> list[Tool]:
    functions = Function(name="weather", parameters=CITY, strict=strict or None), Function(name="now")
    return [Tool(type="function", function=function) for function in functions]


def named(name: str) -> NamedTool:
    return NamedTool(type="function", function=FunctionName(name=name))


def call(kind: str, name: str, arguments: Any) -> str:
    key = "parameters" if kind == "llama" else "arguments"
    text = f'{{"name": "{name}", "{key}": {json.dumps(arguments)}}}'
    return text if kind == "llama" else f"<tool_call>\n{text}\n</tool_call>"


class Model:
    """A tokenizer with a template, and what compiles its grammars."""

    def __init__(self, folder: Path, kind: str) -> None:
        (folder / "chat_template.jinja").write_text(TEMPLATES[kind])
        self.tokenizer = Tokenizer.load(folder)
        self._grammars = Grammars(self.tokenizer, self.tokenizer.vocab_size, [2])

    def applied(
        self, choice: ToolChoice | None, parallel: bool = True, strict: bool = False, **more: Any
    ) -> SamplingParams:
        use = tool_use(tools(strict), choice, parallel, self.tokenizer)
        assert use is not None
        return use.applied(SamplingParams(**more))

    def takes(self, params: SamplingParams, text: str) -> bool:
        """Whether a text may be a whole answer."""
        if params.structured is None:
            return True
        constraint = self._grammars.compile(params.structured).start()
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return all(not constraint.ended and constraint.advance(token) for token in tokens) and (
            constraint.ended or bool(constraint.allowed()[2])
        )

    def close(self) -> None:
        self._grammars.close()
        self.tokenizer.close()


@pytest.fixture(scope="module", params=["hermes", "llama"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("grammars")
    write_tokenizer(folder)
    model = Model(folder, kind)
    yield model
    model.close()


def test_a_demanded_call_is_one_of_the_tools(model: Model, kind: str) -> None:
    oslo, wrong = call(kind, "weather", {"city": "Oslo"}), call(kind, "weather", {"city": "Rome"})
    now = call(kind, "now", {})
    for choice in ("required", named("weather")):
        params = model.applied(choice)
        assert model.takes(params, oslo) and not model.takes(params, wrong)
        assert model.takes(params, now) == (choice == "required")
        assert not any(model.takes(params, text) for text in ("", "hello", oslo[:-1], "x" + oslo, oslo + "x"))
    several = kind == "hermes"
    assert model.takes(model.applied("required"), f"{oslo}\n{now}") == several
    assert not model.takes(model.applied("required", parallel=False), f"{oslo}\n{now}")
    assert not model.takes(model.applied(named("now")), f"{now}\n{now}")


def test_calls_of_its_own_accord_follow_the_schema_if_a_tool_is_strict(model: Model, kind: str) -> None:
    oslo, wrong = call(kind, "weather", {"city": "Oslo"}), call(kind, "weather", {"city": "Rome"})
    assert model.applied(None).structured is None
    params = model.applied("auto", strict=True)
    assert model.takes(params, oslo) and not model.takes(params, wrong)
    for text in ("", "hello", 'a <b> {"c"}\n'):
        assert model.takes(params, text)
    around = f"Let me look.\n{oslo}\n and {call(kind, 'now', {})}."
    assert model.takes(params, around)
    assert model.takes(params, around.replace("Oslo", "Rome")) == (kind == "llama"), "there it is text"


def test_a_response_format_is_the_other_way_to_answer(model: Model, kind: str) -> None:
    for strict in (False, True):  # only the arguments of a strict tool follow its schema
        params = model.applied("auto", strict=strict, structured=FORM)
        assert model.takes(params, '["a"]') and model.takes(params, call(kind, "now", {}))
        assert not model.takes(params, "hello") and model.takes(params, call(kind, "weather", {})) == (not strict)
    with pytest.raises(RequestError, match="response_format only"):
        model.applied("auto", structured=StructuredOutput(regex="a"))
    for choice in ("required", named("now")):  # there is no other answer
        assert model.applied(choice, structured=FORM) == model.applied(choice)
        with pytest.raises(RequestError, match="response_format only"):
            model.applied(choice, structured=StructuredOutput(regex="a"))


def test_where_the_way_of_calling_is_unknown_only_demanded_calls_have_a_grammar(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    model = Model(tmp_path, "unknown")
    assert model.applied("auto", strict=True).structured is None
    assert model.applied("auto", structured=FORM).structured == FORM
    assert model.takes(model.applied(named("now")), call("hermes", "now", {}))
    model.close()


@pytest.mark.parametrize("special", [False, True])
def test_marks_may_be_tokens_of_their_own(tmp_path: Path, special: bool) -> None:
    """The text of special ones must be shown, or nothing would show where a call begins."""
    write_tokenizer(tmp_path)
    backend = TokenizerJson.from_file(str(tmp_path / "tokenizer.json"))
    add = backend.add_special_tokens if special else backend.add_tokens
    add([AddedToken(mark, special=special) for mark in ("<tool_call>", "</tool_call>")])
    backend.save(str(tmp_path / "tokenizer.json"))
    model = Model(tmp_path, "hermes")
    for choice, strict in (("required", False), ("auto", True)):
        params = model.applied(choice, strict=strict)  # type: ignore[arg-type]
        assert params.skip_special_tokens != special
        assert model.takes(params, call("hermes", "now", {})) and not model.takes(params, call("hermes", "weather", {}))
    assert model.takes(model.applied("auto", strict=True), f"Well, {call('hermes', 'now', {})}")
    model.close()
