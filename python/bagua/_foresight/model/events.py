"""A discrete-event model of one rank: tasks that share its cores and its links."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Timeline"]

_NOTHING = 1e-15  # seconds of work that count as done
_AT_ONCE = 1e12  # seconds of a wait that pass in a second where there is nothing to wait for


class Timeline:
    """Tasks with an order, on the cores and links of one rank.

    A task has an amount of work, in seconds at full speed. It runs from the end of the last task
    that it comes after. While it runs it wants a number of cores (0 to 1) and perhaps a link.

    - Tasks on one link have equal shares of it.
    - Tasks that want less than an equal share of the cores get what they want, the others share the
      rest equally, as a scheduler that prefers threads that sleep often does (max-min fairness). A
      transfer that gets fewer cores than it wants is slower by as much.
    - A thread that wakes up waits for a core, unless one is free: then it runs at once. Where ranks
      outnumber the cores, none is ever free.

    Args:
        cores: that all tasks share; less than 1 counts as 1, since figures contain what ranks take
            from each other.

    Attributes:
        start: seconds at which each task began, after :meth:`run`.
        end: likewise at which it ended.
    """

    def __init__(self, cores: float) -> None:
        self._cores = max(1.0, cores)
        self._crowded = cores < 1
        self._work: list[float] = []
        self._demand: list[float] = []
        self._link: list[str | None] = []
        self._wakes: list[bool] = []
        self._waits_for: list[int] = []
        self._followers: list[list[int]] = []
        self.start: list[float] = []
        self.end: list[float] = []

    def add(
        self,
        work: float,
        *,
        cores: float = 0.0,
        link: str | None = None,
        wakes: bool = False,
        after: Iterable[int | None] = (),
    ) -> int:
        """Add a task; returns its number.

        Args:
            work: seconds at full speed.
            cores: that it wants meanwhile.
            link: that it wants meanwhile; None: none.
            wakes: it is a thread's wait for a core.
            after: tasks that end before it begins; None is no task.
        """
        number = len(self._work)
        self._work.append(max(0.0, work))
        self._demand.append(cores)
        self._link.append(link)
        self._wakes.append(wakes)
        before = {task for task in after if task is not None}
        self._waits_for.append(len(before))
        self._followers.append([])
        for task in before:
            self._followers[task].append(number)
        return number

    def run(self) -> float:
        """Run all tasks; returns the seconds at which the last one ended."""
        self.start = [0.0] * len(self._work)
        self.end = [0.0] * len(self._work)
        waits_for = list(self._waits_for)
        running: dict[int, float] = {}  # seconds of work that are left
        free = [task for task, number in enumerate(waits_for) if number == 0]
        now = 0.0
        while free or running:
            while free:
                task = free.pop()
                self.start[task] = now
                if self._work[task] > _NOTHING:
                    running[task] = self._work[task]
                    continue
                self._finish(task, now, waits_for, free)
            if not running:
                break
            speeds = self._speeds(running)
            passed = min(left / speeds[task] for task, left in running.items())
            now += passed
            for task in list(running):
                running[task] -= passed * speeds[task]
                if running[task] <= _NOTHING + 1e-12 * self._work[task]:
                    del running[task]
                    self._finish(task, now, waits_for, free)
        return now

    def _finish(self, task: int, now: float, waits_for: list[int], free: list[int]) -> None:
        self.end[task] = now
        for follower in self._followers[task]:
            waits_for[follower] -= 1
            if waits_for[follower] == 0:
                free.append(follower)

    def _speeds(self, running: Iterable[int]) -> dict[int, float]:
        """Seconds of work per second of each running task."""
        users: dict[str, int] = {}
        for task in running:
            link = self._link[task]
            if link is not None:
                users[link] = users.get(link, 0) + 1
        speeds: dict[int, float] = {}
        for task in running:
            link = self._link[task]
            speeds[task] = 1.0 if link is None else 1.0 / users[link]
        wanted = {task: self._demand[task] * speeds[task] for task in speeds}
        if sum(wanted.values()) < self._cores and not self._crowded:
            speeds |= {task: _AT_ONCE for task in speeds if self._wakes[task]}
        if sum(wanted.values()) > self._cores:
            level = _fair_share(list(wanted.values()), self._cores)
            for task, demand in wanted.items():
                if demand > level:
                    speeds[task] *= level / demand
        return speeds


def _fair_share(wanted: list[float], cores: float) -> float:
    """The share of each demand above it, where all others are met and all cores are used."""
    left, sharers = cores, len(wanted)
    for demand in sorted(wanted):
        if demand * sharers >= left:
            break
        left -= demand
        sharers -= 1
    return left / sharers
