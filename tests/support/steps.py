"""What a build tells of its steps: nothing, their titles, the units that are left, or an interruption."""

from __future__ import annotations

from collections.abc import Callable

from draftwood.builder.progress import Begin, Step


def quiet(step: Step) -> Callable[[], None]:
    return lambda: None


def noted(titles: list[str]) -> Begin:
    """Their titles are added to a list."""

    def begin(step: Step) -> Callable[[], None]:
        titles.append(step.title)
        return lambda: None

    return begin


def counted(left: dict[str, int]) -> Begin:
    """left: the units of each title that are not done."""

    def begin(step: Step) -> Callable[[], None]:
        left[step.title] = left.get(step.title, 0) + step.units

        def advance() -> None:
            left[step.title] -= 1

        return advance

    return begin


def failing(title: str, error: BaseException | type[BaseException]) -> Begin:
    """The first step with these words in its title raises an error."""

    def begin(step: Step) -> Callable[[], None]:
        if title in step.title:
            raise error
        return lambda: None

    return begin
