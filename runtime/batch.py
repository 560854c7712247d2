"""`complete`: writes the texts of one call of `LLM.generate` or `LLM.chat`, together where the engines allow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ..models.errors import RequestError, shown
from .decoding.request import Request
from .decoding.round import Observer
from .decoding.scheduler import MAX_RUNNING
from .engines.shared.pool import PREFIX_CACHE_SLOTS
from .sampling.params import SamplingParams
from .text.result import RequestOutput, output_of
from .text.writer import StreamChunk

if TYPE_CHECKING:
    from .llm import LLM, Speculation


class AskedPrompt(NamedTuple):
    """One prompt of a call. text: as given, or as the chat template wrote it; None for token ids."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams


def complete(
    llm: LLM,
    texts: Sequence[str | None],
    prompts: Sequence[list[int]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    use_tqdm: bool,
    observe: Observer | None = None,
    speculative: Speculation = "own",
) -> list[RequestOutput]:
    """Complete prompts, which the LLM has encoded. texts: see AskedPrompt.text. For the others see `LLM.generate`."""
    params_by_prompt = params_of(sampling_params, len(prompts), llm.get_default_sampling_params)
    asked = list(map(AskedPrompt, texts, prompts, params_by_prompt))
    choices = [(each.token_ids, params) for each in asked for params in each.params.choices()]
    shares = llm.is_pooled or llm.max_batch is not None
    with progress(len(choices), use_tqdm) as advance:
        if len(choices) > 1 and observe is None and shares:
            written = write_together(llm, choices, advance, speculative)
        else:
            written = []
            for prompt, params in choices:
                written.append(list(llm.stream(prompt, params, observe, speculative)))
                advance()
    rest = iter(written)
    outputs = []
    for each in asked:
        chunks = [next(rest) for _ in range(each.params.n)]
        outputs.append(output_of(next(llm.request_numbers), each.text, each.token_ids, chunks, llm.token_text))
    return outputs


def write_together(
    llm: LLM,
    choices: Sequence[tuple[list[int], SamplingParams]],
    advance: Callable[[], None],
    speculative: Speculation,
) -> list[list[StreamChunk]]:
    """The chunks of several texts that share passes. advance: called after each text."""
    at_most = min(llm.max_batch or MAX_RUNNING, len(choices))
    with closing(llm.scheduler(at_most, len(choices), prefix_cache_slots=PREFIX_CACHE_SLOTS)) as scheduler:
        requests = [llm.request(prompt, params, scheduler, speculative=speculative) for prompt, params in choices]
        texts: dict[Request[StreamChunk], list[StreamChunk]] = {request: [] for request in requests}
        for request, chunk in scheduler.run(requests):
            texts[request].append(chunk)
            if chunk.finish_reason is not None:
                advance()
    return list(texts.values())


def params_of(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int, default: Callable[[], SamplingParams]
) -> list[SamplingParams]:
    """The settings of `count` prompts: None takes the default, one is for all, or each has its own. Raises RequestError
    for another number of settings, and for what are none."""
    if given is None or isinstance(given, SamplingParams):
        return [given or default()] * count
    if not isinstance(given, Sequence) or not all(isinstance(each, SamplingParams) for each in given):
        raise RequestError(f"sampling_params must be a SamplingParams or a list of them, not {shown(given)}")
    if len(given) != count:
        raise RequestError(f"there are {count} prompts and {len(given)} sampling_params: give one for each, or one")
    return list(given)


@contextmanager
def progress(total: int, shows: bool) -> Iterator[Callable[[], None]]:
    """A function to call after each finished text. shows: whether to show a progress bar on standard error."""
    if not shows:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bars:
        task = bars.add_task("Texts", total=total)
        yield lambda: bars.advance(task)
