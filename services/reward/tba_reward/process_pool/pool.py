"""The pool of worker processes: one queue, one job per worker at a time, and one spare worker.

    score() -> queue of jobs, a few items each -> the next idle worker -> a reply for each item
                           |  an item takes more CPU time than its deadline: it fails as `too_slow`. It takes much more
                           |  wall-clock time: it fails as `timeout`. In both cases its worker is killed.
                           |  the worker dies: the item is tried once more in another worker, then fails as `crashed`
                           '  the items behind it go back to the front of the queue

The spare worker has loaded all rules, so it replaces a killed worker at once. A new spare has to import the rules,
which takes seconds for sympy. A second kill within that time leaves the pool one worker short.

A rule may take several items at once (`WorkerRule.batch_items`): a batch is one job. A batch is split into its items
when it is slow, exceeds its deadline or its worker dies. Such a rule is foreign code. While one of its jobs is slow,
the pool runs one more worker. While HUNG_ITEMS items of a prompt are slow, its further items wait. If the slow items
exceed their deadline, the further items fail as well.

Waits: an item waits in the queue until its request's deadline (`RewardSection.request_deadline_s`), and in a worker at
most WALL_SLACK_S longer than its own deadline.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress

from tba.api.scores import ScoreReason
from tba.logs import get_logger
from tba_reward.child_messages import describe_exit
from tba_reward.process_pool.job import ItemKey, Job, PoolRule, WorkerRule
from tba_reward.process_pool.worker_handle import WorkerHandle
from tba_reward.process_pool.worker_main import EXIT_OUT_OF_MEMORY
from tba_reward.scorer import OK, Failure, Item, Outcome

CHUNK_ITEMS = 8
"""Most items of one job of a Rule. Several per job spare the worker a wait for each item."""
CHUNK_S = 20.0
"""Largest sum of the item deadlines of one job: slow items must not delay the items behind them for too long."""
WATCH_S = 0.05
"""Pause between two checks of the running jobs. Only the second check past a limit kills the worker. At the first, the
event loop may have been too busy to read the reply from the socket."""
WALL_SLACK_S = 25.0
"""Wall-clock seconds that an item may take beyond its deadline in CPU time; less than a request's own extra time."""
ABANDONED_S = 0.5
"""An item that nobody waits for any more may run for this long before its worker is killed."""
LOAD_AGAIN_S = 30.0
"""Pause before another attempt to load a rule that could not be loaded."""
SLOW_S = 1.0
"""A job of a rule that takes batches is slow after this time or twice `PoolRule.longest_s`, whichever is longer."""
MAX_SLOW_WORKERS = 8
"""Most workers beyond `num_workers` that replace slow ones."""
HUNG_ITEMS, HUNG_S = 2, 60.0
"""After this many items of a prompt have hung, its other items fail at once for this many seconds."""
RESTART_S = 1.0
"""Pause before new workers are started after one could not be started, or died before it had scored anything."""
log = get_logger("workers")


class WorkerPool:
    """Worker processes, shared by all rules that run in them; the first `prepare` or `score` starts them.

    Args:
        num_workers: most processes that score at the same time, slow ones not counted.
        max_memory_bytes: address-space limit of each process; None: no limit.
        start_timeout_s: deadline for a worker to load one rule.
        on_loss: called with the reason when a worker was killed at a deadline or has died.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        max_memory_bytes: int | None,
        start_timeout_s: float,
        on_loss: Callable[[str], None] = lambda cause: None,
    ) -> None:
        self._on_loss = on_loss
        self._num_workers, self._max_memory_bytes = num_workers, max_memory_bytes
        self._start_timeout_s = start_timeout_s
        self._rules: dict[str, PoolRule] = {}
        """The rules that every worker loads, by their key."""
        self._loads_changed = asyncio.Event()
        self._queue: deque[Job] = deque()
        self._workers: list[WorkerHandle] = []
        self._tasks: set[asyncio.Task[object]] = set()
        self._suspects: Counter[ItemKey] = Counter()
        """For each prompt, how many of its items have hung or are slow now."""
        self._hung: dict[ItemKey, tuple[int, float]] = {}
        """For each prompt, how many of its items have hung, and the event loop time until which that counts."""
        self._start_after_s = 0.0
        self._watcher: asyncio.Task[None] | None = None
        self._is_closed = False
        self._problem = ""

    async def close(self) -> None:
        """End all processes; items that are not scored yet become failures."""
        self._is_closed = True
        self._problem = "the reward service is stopping"
        if self._watcher is not None:
            self._watcher.cancel()
        for job in [*(worker.job for worker in self._workers if worker.job is not None), *self._queue]:
            job.fail(Failure("unreachable", self._problem))
        self._queue.clear()
        for worker in list(self._workers):
            self._remove(worker)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def prepare(self, rule: WorkerRule) -> None:
        """Load a rule; return when a worker has it, the load failed, or 2 * `start_timeout_s` passed (see `health`)."""
        known = self._known(rule)
        known.load_error = None
        self._dispatch()
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * self._start_timeout_s):  # a load that crashes is tried twice
                while not known.is_proven and known.load_error is None and not self._is_closed:
                    self._loads_changed.clear()
                    await self._loads_changed.wait()

    def health(self, rule: WorkerRule) -> str:
        """Return `ok`, or why this rule has no workers."""
        known = self._rules.get(rule.key)
        if known is not None and known.load_error is not None and not self._is_loaded(known):
            return known.load_error
        is_proven = known is not None and known.is_proven
        return self._problem or (OK if is_proven else f"{rule.function} is not loaded yet")

    async def score(self, rule: WorkerRule, items: Sequence[Item], timeout_s: float) -> list[Outcome]:
        """Return one outcome per item, in order. After a cancellation, workers with these items are killed soon.

        Args:
            timeout_s: CPU time that one item may take, or a batch as a whole.
        """
        if self._is_closed:
            return [Failure("unreachable", self._problem)] * len(items)
        known, loop = self._known(rule), asyncio.get_running_loop()
        futures = [loop.create_future() for _ in items]
        # small requests are spread over all workers
        size = rule.batch_items or max(
            1, min(CHUNK_ITEMS, len(items) // (2 * self._num_workers), int(CHUNK_S / timeout_s))
        )
        for at in range(0, len(items), size):
            self._enqueue(known, timeout_s, items[at : at + size], futures[at : at + size])
        self._dispatch()
        return list(await asyncio.gather(*futures))

    def _known(self, rule: WorkerRule) -> PoolRule:
        return self._rules.setdefault(rule.key, PoolRule(len(self._rules), rule))

    def _enqueue(
        self, rule: PoolRule, timeout_s: float, items: Sequence[Item], futures: Sequence[asyncio.Future[Outcome]]
    ) -> None:
        try:
            self._queue.append(Job(rule, timeout_s, items, futures))
        except (TypeError, ValueError, RecursionError) as error:
            # an item that cannot be sent must not take the others of its batch with it
            if len(items) > 1:
                for item, future in zip(items, futures, strict=True):
                    self._enqueue(rule, timeout_s, [item], [future])
                return
            futures[0].set_result(Failure("malformed", f"the item cannot be sent to a worker: {error}"))

    # -- events of workers ------------------------------------------------------------------------------------------

    def _on_reply(self, worker: WorkerHandle, job: Job, outcomes: list[Outcome]) -> None:
        """Record the reply of a worker, and dispatch further jobs when its own job is done."""
        self._problem = ""
        rule = job.rule
        if not job.is_load:
            rule.longest_s = max(job.took_s, 0.99 * (rule.longest_s or 0.0))
            for key in job.prompts if self._hung else ():
                self._hung.pop(key, None)
        elif isinstance(failure := outcomes[0], Failure):
            self._set_load_error(rule, failure.detail)
        else:
            worker.loaded.add(rule.number)
            rule.num_load_crashes, rule.is_proven = 0, True
            self._loads_changed.set()
        if not job.is_done:
            return
        # it was taken while another one was slow
        if len(self._workers) > self._wanted():
            self._remove(worker)
        self._dispatch()

    def _on_lost(self, worker: WorkerHandle) -> None:
        """Replace a worker whose socket has closed: it has died, or `end` will kill it."""
        self._workers.remove(worker)
        self._create_task(self._replace(worker))

    async def _replace(self, worker: WorkerHandle) -> None:
        """Wait for the exit code of a worker that died, and fail or repeat its job."""
        code, job = await worker.end(), worker.job
        how = describe_exit(code)
        if job is None:
            # the next one would die too: something is wrong with this machine or with what it loads
            if worker.num_scored == 0:
                self._pause(f"worker processes end at once ({how}); see the log of the service")
        elif self._is_closed:
            job.fail(Failure("unreachable", self._problem))
        else:
            rule = job.rule
            log.warning("worker_died", rule=rule.rule.function, how=how, num_items=len(job.items))
            failure = Failure("crashed", f"the worker died ({how})")
            if code == EXIT_OUT_OF_MEMORY:
                failure = Failure("out_of_memory", f"it needs more than {self._max_memory_bytes} bytes of memory")
            self._on_loss(failure.reason)
            if not job.is_load:
                # an item may pay for what others did to its worker, or whoever killed that: it is tried once more
                self._blame(job, failure, is_repeated=job.num_crashes == 0)
            elif rule.num_load_crashes == 0:
                # once it may have been killed from outside
                rule.num_load_crashes = 1
            else:
                self._set_load_error(rule, f"{rule.rule.function}: {how} while it was loaded")
        self._dispatch()

    def _blame(self, job: Job, failure: Failure, *, is_repeated: bool = False) -> None:
        """Fail the current item of a job, or repeat it if `is_repeated`, and queue the items behind it again.

        A batch is split instead: each of its items is queued as a job, and none fails yet.
        """
        if job.may_hang and len(job.items) > 1:
            self._queue.extendleft(job.split())
            return
        at = job.num_done
        if job.items[at + 1 :]:
            self._queue.appendleft(job.part(at + 1))
        if is_repeated:
            again = job.part(at, at + 1)
            again.num_crashes = job.num_crashes + 1
            self._queue.appendleft(again)
        else:
            job.settle([failure])

    # -- jobs -------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Check every WATCH_S for jobs over a limit and for slow jobs."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                self._check_limits()
                self._find_slow()
                self._dispatch()
            except Exception:  # a defect here must not leave every later job without a deadline
                log.exception("watch_failed")

    def _check_limits(self) -> None:
        """Kill the workers whose jobs have run over a limit."""
        now_s = asyncio.get_running_loop().time()
        for worker in list(self._workers):
            job, wall_s = worker.job, now_s - worker.since_s
            if job is None:
                continue
            # nobody waits for it: it must not hold the worker
            limit_s = min(job.timeout_s, ABANDONED_S) if job.is_over else job.timeout_s
            if wall_s < limit_s:  # a process takes at most one second of CPU time per second
                continue
            cpu_s = worker.cpu_s()
            is_over = cpu_s >= limit_s or job.is_load or job.is_over or wall_s >= limit_s + WALL_SLACK_S
            if not is_over or not worker.is_late:
                worker.is_late = is_over
                continue
            name, num_items = job.rule.rule.function, len(job.items)
            reason: ScoreReason = "too_slow" if cpu_s >= job.timeout_s and not job.is_load else "timeout"
            took = f"no result after {wall_s:.1f} s, {cpu_s:.2f} s of CPU time"
            if job.is_load:
                self._set_load_error(job.rule, f"{name} was not loaded within {job.timeout_s:g} s")
            elif job.may_hang and num_items == 1 and not job.is_over:
                (key,) = job.prompts
                self._hung[key] = self._hung.get(key, (0, 0.0))[0] + 1, now_s + HUNG_S
            self._blame(job, Failure(reason, f"{took}; the worker was killed"))
            self._on_loss(reason)
            log.warning("worker_killed", rule=name, num_items=num_items, cpu_s=cpu_s, wall_s=wall_s)
            self._remove(worker)

    def _find_slow(self) -> None:
        """Mark the workers with slow jobs. Split a slow batch into its items; count a slow item against its prompt."""
        now_s = asyncio.get_running_loop().time()
        self._hung = {key: (num, until_s) for key, (num, until_s) in self._hung.items() if now_s < until_s}
        self._suspects = Counter({key: num for key, (num, _) in self._hung.items()})
        for worker in self._workers:
            if (job := worker.job) is None or not job.may_hang:
                continue
            longest_s = job.rule.longest_s
            slow_s = max(SLOW_S, job.timeout_s if longest_s is None else 2 * longest_s)
            worker.is_slow = now_s - worker.since_s >= slow_s
            if worker.is_slow and len(job.items) > 1:
                self._queue.extendleft(job.split())
            elif worker.is_slow:
                self._suspects.update(job.prompts)

    def _dispatch(self) -> None:
        """Start missing workers; give idle ones rules to load and jobs from the queue."""
        if self._is_closed or not self._rules:
            return
        self._watcher = self._watcher or asyncio.create_task(self._watch())
        if asyncio.get_running_loop().time() >= self._start_after_s:
            while len(self._workers) < self._wanted():
                new = WorkerHandle(self._max_memory_bytes, on_reply=self._on_reply, on_lost=self._on_lost)
                self._workers.append(new)
                self._create_task(self._start(new))
        for worker in self._workers:
            if worker.is_idle:
                self._load_next(worker)
        held = list[Job]()
        while self._queue:
            job = self._queue.popleft()
            is_loaded = self._is_loaded(job.rule)
            if not is_loaded and (error := self._load_error(job.rule)) is not None:
                job.fail(Failure("exception", error))
            if job.is_over:
                continue
            num = max((self._suspects[key] for key in job.prompts), default=0) if self._suspects else 0
            if num and len(job.items) > 1:
                self._queue.extendleft(job.split())
            elif num >= HUNG_ITEMS and any(self._hung.get(key, (0,))[0] >= HUNG_ITEMS for key in job.prompts):
                prompt = job.items[0].prompt
                job.fail(Failure("timeout", f"not asked: the last {HUNG_ITEMS} responses to {prompt!r:.60} hung"))
            elif num >= HUNG_ITEMS:
                held.append(job)
            elif (worker := self._free_worker(job.rule)) is not None:
                worker.submit(job)
            else:
                held.append(job)
                # a rule that takes long to load holds up no other one
                if is_loaded:
                    break
        self._queue.extendleft(reversed(held))

    def _free_worker(self, rule: PoolRule) -> WorkerHandle | None:
        """Return an idle worker that has loaded the rule; None if there is none or `num_workers` are scoring."""
        at_work = (worker for worker in self._workers if worker.job is not None and not worker.job.is_load)
        if sum(not worker.is_slow for worker in at_work) >= self._num_workers:
            return None
        return next((worker for worker in self._workers if worker.is_idle and rule.number in worker.loaded), None)

    def _is_loaded(self, rule: PoolRule) -> bool:
        return any(rule.number in worker.loaded for worker in self._workers)

    def _load_next(self, worker: WorkerHandle) -> None:
        """Let an idle worker load a rule that it lacks."""
        loading = [each.job.rule for each in self._workers if each.job is not None and each.job.is_load]
        for rule in self._rules.values():
            if rule.is_proven:
                may_load = self._load_error(rule) is None
            else:
                may_load = rule not in loading and rule.load_error is None
            if may_load and rule.number not in worker.loaded:
                worker.submit(Job(rule, self._start_timeout_s))
                return

    def _load_error(self, rule: PoolRule) -> str | None:
        """Return why a rule could not be loaded; None once it may be tried again."""
        if rule.load_error is not None and asyncio.get_running_loop().time() >= rule.retry_at_s:
            rule.load_error = None
        return rule.load_error

    def _set_load_error(self, rule: PoolRule, sentence: str) -> None:
        rule.load_error, rule.retry_at_s = sentence, asyncio.get_running_loop().time() + LOAD_AGAIN_S
        rule.num_load_crashes = 0
        self._loads_changed.set()

    # -- processes --------------------------------------------------------------------------------------------------

    def _wanted(self) -> int:
        """Return how many workers there should be, the spare one included."""
        return self._num_workers + min(sum(worker.is_slow for worker in self._workers), MAX_SLOW_WORKERS) + 1

    async def _start(self, worker: WorkerHandle) -> None:
        try:
            await worker.start()
        except OSError as error:  # no memory, or too many processes
            self._pause(f"worker processes cannot be started: {error}")
            if worker in self._workers:
                self._workers.remove(worker)
            return
        self._dispatch()

    def _pause(self, problem: str) -> None:
        self._problem = problem
        self._start_after_s = asyncio.get_running_loop().time() + RESTART_S
        log.error("workers_do_not_start", why=problem)

    def _remove(self, worker: WorkerHandle) -> None:
        """Remove a worker from the pool, and kill it."""
        self._workers.remove(worker)
        worker.ask_to_kill()
        self._create_task(worker.end())

    def _create_task(self, coroutine: Coroutine[None, None, object]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
