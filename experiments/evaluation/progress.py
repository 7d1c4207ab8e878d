"""How far an evaluation has come: documents done of all, and the time left.

lm-eval draws a bar for every task, which is held back; :func:`counted` sees what it counts. On a terminal one bar
covers all models and tasks; elsewhere there is a line for each task that ends, and one every few seconds.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from experiments.common.words import in_words
from experiments.evaluation.inputs import Model, TaskFile

Tell = Callable[[str, str, float, int], None]  # model, task, documents done, all documents of the task
LINE_SECONDS = 10.0  # between two lines where there is no terminal
TELL_SECONDS = 0.5  # between two messages of one process


class Progress:
    """Documents done of all models and tasks.

    Args:
        pending: the tasks of each model that are to be done. A task of unknown size counts as much as the mean.
        live: a bar that moves, on a terminal; else lines. None: as standard error is.
        clock: seconds, for the time left.
    """

    def __init__(
        self,
        pending: Sequence[tuple[Model, Sequence[TaskFile]]],
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        pairs = [(model.name, task) for model, tasks in pending for task in tasks]
        self.done = {(model, task.name): 0.0 for model, task in pairs}
        sizes = {task.name: task.reference.get("documents") for _, task in pairs}
        self.sizes = {name: int(size) for name, size in sizes.items() if size}
        self.clock, self.began = clock, clock()
        self.said, self.stream = self.began, sys.stderr  # what lm-eval prints is held back, these lines are not
        self.now = ""
        self.bar: Any = None
        if sys.stderr.isatty() if live is None else live:
            from rich.console import Console
            from rich.progress import Progress as Bars

            self.bar = Bars(console=Console(file=self.stream))
            self.row = self.bar.add_task("evaluate", total=None)

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        else:
            print(f"{self.words()} (loading)", file=self.stream, flush=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def size(self, task: str) -> float:
        known = self.sizes.values()
        return self.sizes.get(task, sum(known) / len(known) if known else 1.0)

    def counts(self) -> tuple[float, float]:
        """Documents done, and all of them."""
        return sum(self.done.values()), sum(self.size(task) for _, task in self.done)

    def words(self) -> str:
        """``120 of 4000 documents, about 3 min left``."""
        done, total = self.counts()
        passed = self.clock() - self.began
        left = f", about {in_words(passed * (total - done) / done)} left" if 0 < done < total else ""
        return f"{done:.0f} of {total:.0f} documents{left}"

    def tell(self, model: str, task: str, done: float, total: int) -> None:
        """``done`` of the ``total`` documents of a task are done."""
        ended = done >= total and self.done[model, task] < total
        self.sizes[task] = total
        self.done[model, task] = min(done, total)
        self.now = f"{model} {task}"
        self.show(at_once=ended)

    def show(self, *, at_once: bool = False) -> None:
        """Draw the bar anew, or write a line if it is time for one."""
        if self.bar is not None:
            done, total = self.counts()
            self.bar.update(self.row, completed=done, total=total, description=self.now or "evaluate")
        elif at_once or self.clock() - self.said >= LINE_SECONDS:
            self.said = self.clock()
            print(f"{self.words()} ({self.now or 'loading'})", file=self.stream, flush=True)


def seldom(tell: Tell) -> Tell:
    """The same, at most twice a second but for the end of a task."""
    last = -math.inf

    def told(model: str, task: str, done: float, total: int) -> None:
        nonlocal last
        if done >= total or time.monotonic() - last >= TELL_SECONDS:
            last = time.monotonic()
            tell(model, task, done, total)

    return told


def _passages(lm: Any, requests: Sequence[Any]) -> int:
    """Calls of the model that texts need when they are longer than it reads at once."""
    return sum(max(1, math.ceil(len(lm.tok_encode(request.args[0])) / lm.max_length)) for request in requests)


@contextlib.contextmanager
def counted(lm: Any, tell: Callable[[float, int], None]) -> Iterator[None]:
    """While ``lm`` answers lm-eval's requests, ``tell`` gets the documents done and their number."""
    from lm_eval.models import huggingface

    plain: Any = huggingface.tqdm
    kinds: Mapping[str, Any] = {
        "loglikelihood": lambda requests: len(requests),
        "loglikelihood_rolling": lambda requests: _passages(lm, requests),
        "generate_until": lambda requests: len(requests),
    }

    def listening(answer: Any, calls: Any) -> Any:
        def answered(requests: Any, *args: Any, **kwargs: Any) -> Any:
            documents, total, done = len({request.doc_id for request in requests}), calls(requests), 0

            class Counted(plain):
                def update(self, n: int = 1) -> Any:
                    nonlocal done
                    done += n
                    tell(documents * min(done / total, 0.999), documents)
                    return super().update(n)

            huggingface.tqdm = Counted
            try:
                return answer(requests, *args, **kwargs)
            finally:
                huggingface.tqdm = plain

        return answered

    for kind, calls in kinds.items():
        setattr(lm, kind, listening(getattr(lm, kind), calls))
    try:
        yield
    finally:
        for kind in kinds:
            delattr(lm, kind)
