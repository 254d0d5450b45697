"""Progress of long work: a bar on a terminal, nothing anywhere else, so that a log holds results alone."""

import sys
from collections.abc import Iterable, Iterator, Sized

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def track(items: Iterable, title: str, total: int | None = None, shown: bool = True) -> Iterator:
    """Yield `items`, with a bar on standard error meanwhile; what is printed goes above it.

    total: how many there are, where `items` does not know. shown: False for a process that stays silent.
    """
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield from items
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("to go"), TimeRemainingColumn(), console=console, transient=True) as progress:
        total = len(items) if total is None and isinstance(items, Sized) else total
        yield from progress.track(items, total=total, description=title)


def quiet_libraries() -> None:
    """Away from a terminal, datasets, transformers and the Hub's client draw no bars: a log keeps every redraw."""
    if sys.stderr.isatty():
        return
    import datasets
    import huggingface_hub
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()
