"""Progress bars for every long loop: what is done, how fast, how long yet; on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from dflash_eval import ranks

console = Console(stderr=True)


def say(line: str) -> None:
    """A line on stderr, above the bars where there are any."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if speed is None and task.elapsed:
            speed = task.completed / task.elapsed
        return Text(f"{speed:,.0f} {self.unit}/s" if speed else f"- {self.unit}/s", style="progress.data.speed")


@contextmanager
def progress(description: str, total: int, unit: str = "tokens") -> Iterator[Callable[[int], None]]:
    """One bar; yields `advance(amount)`."""
    with bars(unit) as bar, bar(description, total) as advance:
        yield advance


@contextmanager
def bars(unit: str) -> Iterator[Callable[[str, int], AbstractContextManager[Callable[[int], None]]]]:
    """Bars below each other, from any thread; yields `bar(description, total)`, a context that yields `advance`."""
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        _Rate(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console, disable=ranks.rank() > 0) as display:

        @contextmanager
        def bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
            task = display.add_task(escape(description), total=total)
            yield lambda amount: display.advance(task, amount)
            done = next(t.completed for t in display.tasks if t.id == task)
            display.update(task, total=done)  # an early end is the end, not an estimate

        yield bar
