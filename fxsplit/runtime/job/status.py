"""The present state of a pipeline's workers. It shows why a step does not end."""

from __future__ import annotations

from dataclasses import dataclass

from fxsplit.system.shown import Parts, Shown, Table

NO_WORKERS = "no workers yet: they start with the first batch"


@dataclass(frozen=True)
class WorkerStatus:
    """One worker's state: its number, its device, and its present action.

    operation: the kind of action, such as "forward", or "idle".
    stage: None if the worker is idle.
    microbatch: None if the worker is idle, or its action has no microbatch.
    node: the node that the stage is running, with the user's line; empty if none is known.
    waits: whether it waits for a message of another worker.
    seconds: the time since the action began, including waits.
    """

    worker: int
    device: str
    operation: str = "idle"
    stage: int | None = None
    microbatch: int | None = None
    node: str = ""
    waits: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        name = f"worker {self.worker} on {self.device}"
        if self.stage is None:
            return f"{name}: {self.operation}"
        microbatch = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        waits = ", waiting for another worker" if self.waits else ""
        return f"{name}: stage {self.stage}, {self.operation}{microbatch}{self.node}{waits}, for {self.seconds:.1f} s"


@dataclass(frozen=True, repr=False)
class Status(Shown):
    """The state of every worker of a pipeline. Print it to read it. It is empty before the first batch."""

    workers: tuple[WorkerStatus, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether all workers are idle."""
        return all(worker.stage is None for worker in self.workers)

    def describe(self) -> str:
        """Return one line of text for each worker, for error messages."""
        return "\n".join(map(str, self.workers)) or NO_WORKERS

    def show(self) -> Parts:
        """Return a table with a row for each worker, followed by the nodes that the workers run."""
        if not self.workers:
            return [NO_WORKERS]
        rows = []
        for each in self.workers:
            busy = each.stage is not None
            doing = f"{each.operation}, waits for another worker" if each.waits else each.operation
            numbers = ("-" if number is None else number for number in (each.stage, each.microbatch))
            rows.append((each.worker, each.device, doing, *numbers, f"{each.seconds:.1f} s" if busy else "-"))
        table = Table((">worker", "device", "does", ">stage", ">microbatch", ">for"), rows)
        # A node comes with the user's line, which has no room in a column.
        return [table, *(f"worker {each.worker} is in{each.node[1:]}" for each in self.workers if each.node)]

    def summarise(self) -> str:
        """Return how many workers there are, and how many have something to do."""
        busy = sum(worker.stage is not None for worker in self.workers)
        return f"{len(self.workers)} workers, {busy} busy"
