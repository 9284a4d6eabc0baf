"""Branch and bound over layouts: cheap lower bounds first, then the plans of what is left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import heapify, heappop
from itertools import chain
from math import inf
from typing import Any, NamedTuple

from pydantic import BaseModel

from megapipe.config.config import Config
from megapipe.config.keys import user_code_keys
from megapipe.errors import ConfigError, MegapipeError, ScheduleError
from megapipe.layout.checks import check_device
from megapipe.layout.devices import device_kind
from megapipe.layout.speeds import known_speeds
from megapipe.plan.cache import Cache, key_of
from megapipe.plan.memory_fit import size_text
from megapipe.plan.search.estimate import Estimate, ShapeCost
from megapipe.plan.search.explain import TooLarge
from megapipe.plan.search.layouts import (
    DEFAULTS,
    VARIED,
    LayoutChoice,
    layouts,
    value_of,
    with_keys,
    words_of,
)
from megapipe.plan.search.pipelines import Pipeline, pipeline_of
from megapipe.plan.search.planner import LayoutJob, LayoutPlan, Planner
from megapipe.schedule.generators.registry import accepts
from megapipe.schedule.load import is_user_schedule
from megapipe.util.process_pool import ProcessPool, WorkerDied, cores

LEAST_LAYERS = 3
"""Minimum number of layers of a model whose layouts are searched."""
SECTIONS = ("pipeline", "activations")
"""Sections whose values come from the search alone."""
MIN_POOLED = 100
"""Minimum number of layouts for each process of a search; a process loads torch first."""


class Progress(NamedTuple):
    """State of a search, for the line that is shown while it runs."""

    done: int
    total: int
    what: str
    """Name of the counted things, and what is done with them."""
    best: Estimate | None = None


class SearchRecord(BaseModel):
    """Results of searches of one configuration, cached for the next ones; by text of a shape or of
    a layout."""

    costs: dict[str, ShapeCost | str] = {}
    """Costs of shapes, or why a shape is impossible."""
    plans: dict[str, LayoutPlan] = {}


class FoundLayouts(NamedTuple):
    """Result of a search."""

    best: Sequence[Estimate]
    """Fastest layouts that fit, the fastest first."""
    front: Sequence[Estimate]
    """Layouts that fit, the fastest first, each with less memory than all that are faster or as
    fast. Some are missing if only the fastest layouts were searched."""
    planned: Sequence[Estimate]
    """All layouts that fit and were planned in full, in any order."""
    considered: int
    """Number of layouts whose sizes divide each other."""
    left_out: int
    """Number of layouts whose memory, by a lower bound or by their plan, exceeds the device, or
    which a check refuses."""
    least: tuple[int, LayoutChoice] | None
    """Least planned peak bytes, and the layout that needs them; None if no plan was made."""
    refusal: str | None
    """Why a layout was refused, if one was."""
    complete: bool
    """Whether the search ended; False if it was interrupted."""


class _Entry(NamedTuple):
    """A layout that waits for its plan; entries are ordered by bound."""

    bound: float
    """Lower bound of the seconds of a step."""
    number: int
    choice: LayoutChoice
    bytes: float
    """Lower bound of the peak bytes."""


class _State:
    """Results of a search so far."""

    def __init__(self, top: int, *, with_front: bool) -> None:
        self._top, self._with_front = top, with_front
        self.best: list[Estimate] = []
        self.front: list[Estimate] = []
        self.planned: list[Estimate] = []
        self.left_out = 0
        self.least: tuple[int, LayoutChoice] | None = None

    @property
    def fastest(self) -> Estimate | None:
        """Fastest layout."""
        return self.best[0] if self.best else None

    @property
    def top_limit(self) -> float:
        """Seconds at which a layout is no longer among the fastest ones."""
        return self.best[-1].seconds if len(self.best) == self._top else inf

    def limit(self, size: float) -> float:
        """Return the seconds at which a layout that needs at least `size` bytes is of no
        interest."""
        if not self._with_front:
            return self.top_limit
        as_small = (each.seconds for each in self.front if each.bytes <= size)
        return max(self.top_limit, min(as_small, default=inf))

    def is_done(self, bound: float) -> bool:
        """Whether no layout of at least `bound` seconds is of interest, whatever its memory."""
        return not self._with_front and bound >= self.top_limit

    def take(self, choice: LayoutChoice, plan: LayoutPlan) -> None:
        """Add a layout's plan."""
        if plan.bound is None:
            self.left_out += 1
        if plan.bytes is None:
            return
        if self.least is None or plan.bytes < self.least[0]:
            self.least = plan.bytes, choice
        if plan.estimate is None:
            self.left_out += 1
            return
        self.planned.append(plan.estimate)
        self.best = sorted([*self.best, plan.estimate], key=_order)[: self._top]
        self.front = front([*self.front, plan.estimate])


def front(found: Iterable[Estimate]) -> list[Estimate]:
    """Return, the fastest first, the layouts with less memory than all that are faster or as
    fast."""
    kept: list[Estimate] = []
    for each in sorted(found, key=_order):
        if not kept or each.bytes < kept[-1].bytes:
            kept.append(each)
    return kept


def _order(found: Estimate) -> tuple[float, int, str]:
    return found.seconds, found.bytes, str(found.choice)


class Search:
    """A search for the fastest layouts of one configuration."""

    def __init__(
        self, config: Config, free: Collection[str], gpus: int, cache: Cache | None = None
    ) -> None:
        """Prepare a search.

        Args:
            config: configuration.
            free: keys whose values the search chooses (of :data:`VARIED`); others keep theirs.
            gpus: number of devices.
            cache: cache of measurements; default: the user's.

        Raises:
            ConfigError: a wrong configuration, or a device of unknown speed or memory.
        """
        self.config = config = with_keys(config, {key: DEFAULTS[key] for key in free})
        self.free, self.gpus = frozenset(free), gpus
        check_device(config.plan)
        if config.model.source is not None:
            raise ConfigError(
                f"model.source={config.model.source}: a search does not know the layers of such a "
                "model: expected none; plan layouts one by one with megapipe train --dry-run"
            )
        if config.model.layers < LEAST_LAYERS:
            raise ConfigError(
                f"model.layers={config.model.layers}: expected at least {LEAST_LAYERS} for a "
                "search, which measures an inner layer apart from the first and the last"
            )
        _check_schedule(config.pipeline.schedule)
        self.speeds = known_speeds(config)
        named = any(user_code_keys(config))  # a key does not cover the files of user code
        self._cache = Cache([]) if named else cache or Cache()
        rest = with_keys(config, DEFAULTS).model_dump(mode="json", exclude={"run"})
        device = repr(self.speeds), device_kind(config)
        self._key = key_of(search=rest, gpus=gpus, device=device)
        self._record = self._cache.read(self._key, SearchRecord) or SearchRecord()
        self.planner = Planner(config, gpus, self._cache)

    def choices(self) -> list[LayoutChoice]:
        """Return all layouts to look at.

        Raises:
            ConfigError: there is none; the text says why.
        """
        found = list(layouts(self.config, self.free, self.gpus))
        if found:
            return found
        helpful = {
            key: value_of(self.config, key)
            for key in VARIED
            if key not in self.free and any(layouts(self.config, {*self.free, key}, self.gpus))
        }
        if helpful:
            other = "other values" if len(helpful) > 1 else "another value"
            raise ConfigError(
                f"no layout of {self.gpus} devices has {' '.join(words_of(helpful))}: expected "
                f"{other}, or none"
            )
        raise ConfigError(
            f"no layout of {self.gpus} devices: expected a number that the batch "
            f"(train.global_batch={self.config.train.global_batch}) and the heads can be split over"
        )

    def run(
        self,
        top: int,
        notify: Callable[[Progress], None] = lambda _: None,
        *,
        with_front: bool = False,
    ) -> FoundLayouts:
        """Return the `top` fastest layouts that fit, and with `with_front` those that are slower
        than others, but need less memory. `notify` is called after each shape and each layout. If
        there are many layouts, each core works on one.

        Ctrl-C ends the search with what it has found so far.

        Raises:
            MegapipeError: a process of the search died.
        """
        choices, state = self.choices(), _State(top, with_front=with_front)
        complete = False
        try:
            with self._workers(len(choices)) as work:
                self._measure(choices, work, notify)
                queue = self._bounded(choices)
                state.left_out, total = len(choices) - len(queue), len(queue)
                for job, plan in work(self._jobs(queue, state)):
                    self._record.plans[str(job.choice)] = plan
                    state.take(job.choice, plan)
                    notify(Progress(total - len(queue), total, "layouts planned", state.fastest))
            complete = True
        except KeyboardInterrupt:
            pass
        except WorkerDied as died:
            raise MegapipeError(f"a process of the search died; exit code {died.code}") from None
        finally:
            self._cache.write(self._key, self._record)
        return FoundLayouts(
            best=state.best,
            front=state.front,
            planned=state.planned,
            considered=len(choices),
            left_out=state.left_out,
            least=state.least,
            refusal=self._refusal(choices),
            complete=complete,
        )

    def _refusal(self, choices: Sequence[LayoutChoice]) -> str | None:
        """Return why one of the layouts was refused; None if none was."""
        costs, plans = self._record.costs, self._record.plans
        of_shapes = (costs.get(str(choice.shape)) for choice in choices)
        of_plans = (plans[name].refusal for name in map(str, choices) if name in plans)
        reasons = (each for each in chain(of_shapes, of_plans) if isinstance(each, str))
        return next(reasons, None)

    def too_large(self, seconds: float) -> TooLarge | None:
        """Return, after a search, the layout with the least lower bound of time among those that do
        not fit; None if no bound is below `seconds`."""
        room = self.speeds.plannable_bytes
        if room is None:
            return None
        found = []
        for choice in self.choices():
            cost = self._record.costs.get(str(choice.shape))
            pipeline, microbatches = self._pipeline(choice), self.microbatches(choice)
            stages = 0 if pipeline is None else pipeline.placement.stages
            if not isinstance(cost, ShapeCost) or stages > self.config.model.layers:
                continue
            size, bound = cost.least_bytes(choice, microbatches, pipeline), None
            plan = self._record.plans.get(str(choice))
            if plan is not None and plan.bytes is not None:
                size, bound = plan.bytes, plan.bound
            if size > room:
                if bound is None:
                    bound = cost.least_seconds(choice, microbatches, pipeline)
                found.append(TooLarge(choice, bound, size))
        least = min(found, key=lambda each: each.seconds, default=None)
        return least if least is not None and least.seconds < seconds else None

    def microbatches(self, choice: LayoutChoice) -> int:
        """Return the number of micro-batches of a step."""
        return self.config.train.global_batch // (choice.dp * choice.shape.microbatch)

    def _pipeline(self, choice: LayoutChoice) -> Pipeline | None:
        return pipeline_of(self.config, choice, self.microbatches(choice))

    @contextlib.contextmanager
    def _workers(self, layouts: int) -> Iterator[Callable[[Iterable[Any]], Iterator[Any]]]:
        """Yield a function that does jobs and yields them with their results."""
        perform = self.planner.perform
        size = min(cores(), layouts // MIN_POOLED)
        if size < 2:
            yield lambda jobs: ((job, perform(job)) for job in jobs)
            return
        with ProcessPool[Any, Any](size, perform) as pool:
            yield pool.run

    def _measure(
        self,
        choices: Sequence[LayoutChoice],
        work: Callable[[Iterable[Any]], Iterator[Any]],
        notify: Callable[[Progress], None],
    ) -> None:
        """Measure the shapes of all layouts."""
        costs, shapes = self._record.costs, {choice.shape: None for choice in choices}
        missing = [shape for shape in shapes if str(shape) not in costs]
        for number, (shape, cost) in enumerate(work(missing), start=1):
            costs[str(shape)] = cost
            notify(Progress(number, len(missing), "shapes measured"))

    def _bounded(self, choices: Sequence[LayoutChoice]) -> list[_Entry]:
        """Return a heap of the layouts that may fit, with lower bounds of their times."""
        found, room = list[_Entry](), self.speeds.plannable_bytes
        for number, choice in enumerate(choices):
            cost = self._record.costs[str(choice.shape)]
            if isinstance(cost, str):
                continue
            microbatches = self.microbatches(choice)
            pipeline = self._pipeline(choice)
            if pipeline is not None and pipeline.placement.stages > self.config.model.layers:
                continue
            size = cost.least_bytes(choice, microbatches, pipeline)
            if room is None or size <= room:
                bound = cost.least_seconds(choice, microbatches, pipeline)
                found.append(_Entry(bound, number, choice, size))
        heapify(found)
        return found

    def _jobs(self, queue: list[_Entry], state: _State) -> Iterator[LayoutJob]:
        """Yield the layouts to plan, the one with the least bound first; take known plans."""
        while queue and not state.is_done(queue[0].bound):
            bound, _, choice, size = heappop(queue)
            limit = state.limit(size)
            plan, cost = self._record.plans.get(str(choice)), self._record.costs[str(choice.shape)]
            assert isinstance(cost, ShapeCost)
            if plan is not None and not plan.is_open(limit):
                state.take(choice, plan)
            elif bound < limit:
                yield LayoutJob(choice, cost, bound, limit)


def nothing_fits(search: Search, found: FoundLayouts) -> str:
    """Say why there is no layout: the least memory found, and what would help."""
    if found.least is None and found.refusal is not None:
        return f"none of {found.considered:,} layouts can be run; for example: {found.refusal}"
    if found.least is None:
        return f"none of {found.considered:,} layouts fits: even their lower bounds do not"
    size, choice = found.least
    limit = search.speeds.plannable_bytes
    room = "" if limit is None else f", but a plan may use {size_text(limit)}"
    keys = " ".join(words_of(choice.keys))
    return (
        f"none of {found.considered:,} layouts fits: the least memory is {size_text(size)}{room}, "
        f"with {keys}; more devices (--gpus) would help"
    )


def _check_schedule(name: str) -> None:
    """Raise ConfigError for an unknown schedule."""
    if not is_user_schedule(name) and name != "auto":
        try:
            accepts(name)
        except ScheduleError as error:
            raise ConfigError(f"pipeline.schedule={name}: {error}") from None


def split_words(words: Sequence[str]) -> tuple[list[str], frozenset[str]]:
    """Return the words of a configuration whose layout is searched, and the keys that are free: all
    that have no value among the words, or the value auto."""
    kept, free = [f"{section}=unset" for section in SECTIONS], set(VARIED)
    before: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        section = key.partition(".")[0]
        if section in SECTIONS and equals and key not in VARIED:
            own = [each for each in VARIED if each.partition(".")[0] in SECTIONS]
            raise ConfigError(
                f"{word}: the search chooses these sections: expected at most {', '.join(own)}"
            )
        if key in VARIED and value == "auto":
            continue
        free.discard(key)
        (kept if section in SECTIONS and equals else before).append(word)
    return [*before, *kept], frozenset(free)
