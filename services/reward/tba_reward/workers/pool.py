"""The pool of worker processes: one queue, a few items per worker ahead, a kill at the deadline.

    score() -> queue -> up to WINDOW jobs per worker, done in their order -> replies
                           |  the first one takes more CPU time than it may: it is too slow, its worker is killed, the
                           |  others go back to the front of the queue, a new worker is forked; the same as a timeout
                           |  where it takes much longer than that by the clock on the wall
                           '  the worker dies: the first one is tried once more in another worker, then it has crashed

A rule may take several items at once (`WorkerRule.batch_items`): a batch is one job. When it runs over its deadline or
its worker dies, it is taken apart into its items.

A worker without work takes what lies behind a slow item of another one (scoring is safe to repeat; the first outcome
counts), so that a poisoned item holds up nobody. Waits: an item in the queue waits as long as its request does
(`reward.request_timeout_s`); in a worker at most WALL_SLACK_S more than its deadline.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice

from tba.errors import UnavailableError
from tba.logs import get_logger
from tba_reward.scorers.base import Failure, Item, Outcome
from tba_reward.scorers.example import OK
from tba_reward.workers.job import Job, alone, next_number, score_job
from tba_reward.workers.link import NurseryLink
from tba_reward.workers.messages import (
    Exited,
    Forked,
    FromNursery,
    OutcomeMessage,
    Prepare,
    Ready,
    Reply,
    Share,
    Shared,
    encode,
)
from tba_reward.workers.rule import RuleKey, WorkerRule
from tba_reward.workers.work import EXIT_OUT_OF_MEMORY
from tba_reward.workers.worker import Worker

WINDOW = 8
"""Items that a worker holds: it never waits for the next one."""
STEAL_AFTER_S = 0.05
"""An item that takes longer than this is slow: what waits behind it may go elsewhere."""
BROKEN_S = 30.0
"""A rule that could not be loaded is tried again after this."""
NURSERY_START_S = 60.0
RESTART_S = 1.0
"""Pause before what could not be started is started again."""
log = get_logger("workers")


class WorkerPool:
    """Worker processes, shared by all rules that run in them.

    Args:
        num_workers: processes at work at once.
        max_memory_bytes: address space of one; None: no bound.
        start_timeout_s: deadline of what a worker loads before its first item.
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
        self._rules: dict[RuleKey, int] = {}
        self._rule_at: dict[int, WorkerRule] = {}
        self._broken: dict[int, tuple[str, float]] = {}
        """Why rules could not be loaded, and when that is tried again."""
        self._shared: dict[int, asyncio.Future[str | None]] = {}
        self._queue: deque[Job] = deque()
        self._workers: dict[int, Worker] = {}
        self._next_worker = 0
        self._link: NurseryLink | None = None
        self._ready = asyncio.Event()
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._again: asyncio.TimerHandle | None = None
        self._fork_after_s = 0.0
        self._is_closed = False
        self._problem = "the worker processes are not started"

    async def start(self) -> None:
        """Start the nursery; nothing where it runs already.

        Raises:
            UnavailableError: it did not answer in time.
        """
        async with self._starting:
            if self._link is None and not self._is_closed:
                await self._launch()

    async def close(self) -> None:
        """End all processes; what is not scored yet becomes a failure."""
        self._is_closed = True
        self._problem = "the reward service is stopping"
        for task in self._tasks:
            task.cancel()
        held = [job for worker in self._workers.values() for job in worker.drop()]
        for job in [*held, *self._queue]:
            job.fail(Failure("unreachable", self._problem))
        self._workers.clear()
        self._queue.clear()
        if self._link is not None:
            await self._link.close()

    async def prepare(self, rule: WorkerRule) -> None:
        """Load a rule wherever it will run; `health` says whether that went well."""
        number = self._number(rule)
        self._broken.pop(number, None)
        if rule.shared:
            await self._share(number)
        self._dispatch()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # workers that connect
        jobs = [self._give_prepare(worker, number) for worker in self._usable() if number not in worker.prepared]
        await asyncio.gather(*(future for job in jobs for future in job.futures))

    def health(self, rule: WorkerRule) -> str:
        """`ok`, or why this rule has no workers."""
        broken = self._broken.get(self._number(rule))
        return broken[0] if broken is not None else self._problem or OK

    async def score(self, rule: WorkerRule, items: Sequence[Item], timeout_s: float) -> list[Outcome]:
        """One outcome per item, in order; cancelled, the workers are free again at once.

        Args:
            timeout_s: CPU time that one item may take, or a batch as a whole.
        """
        if self._is_closed:
            return [Failure("unreachable", self._problem)] * len(items)
        number, loop = self._number(rule), asyncio.get_running_loop()
        futures = [loop.create_future() for _ in items]
        size = rule.batch_items or 1
        for at in range(0, len(items), size):
            self._enqueue(number, items[at : at + size], timeout_s, futures[at : at + size])
        self._dispatch()
        try:
            return list(await asyncio.gather(*futures))
        finally:
            for worker in list(self._workers.values()):
                worker.watch()

    def _enqueue(
        self, number: int, items: Sequence[Item], timeout_s: float, futures: Sequence[asyncio.Future[Outcome]]
    ) -> None:
        try:
            self._queue.append(score_job(number, items, timeout_s, futures))
        except (TypeError, ValueError, RecursionError) as error:
            if len(items) > 1:  # one that cannot be sent must not take the others with it
                for item, future in zip(items, futures, strict=True):
                    self._enqueue(number, [item], timeout_s, [future])
                return
            futures[0].set_result(Failure("malformed", f"the item cannot be sent to a worker: {error}"))

    # -- what workers say -------------------------------------------------------------------------------------------

    def replied(self, worker: Worker, job: Job, reply: Reply) -> None:
        """See `Owner`."""
        self._problem = ""
        if job.is_prepare and reply.outcomes[0].reason is None:
            self._broken.pop(job.rule, None)
        elif job.is_prepare:
            self._set_broken(worker, job.rule, reply.outcomes[0].detail)
        job.settle([_outcome(outcome) for outcome in reply.outcomes])
        if worker.is_retired and not worker.held:
            self._remove(worker)
        self._dispatch()

    def overdue(self, worker: Worker, job: Job, cpu_s: float) -> None:
        """See `Owner`."""
        wall_s = asyncio.get_running_loop().time() - worker.head_since_s
        failure = Failure(
            "timeout", f"no result after {wall_s:.1f} s, {max(cpu_s, 0):.2f} s of CPU time; the worker was killed"
        )
        if job.is_prepare:
            self._set_broken(worker, job.rule, f"{self._name(job)} was not loaded within {job.timeout_s:g} s")
        elif cpu_s >= job.timeout_s:
            failure = Failure(
                "too_slow", f"no result after {job.timeout_s:g} s of CPU time, {wall_s:.1f} s; the worker was killed"
            )
        self._give_up(job, failure)
        self._on_loss(failure.reason)
        log.warning("worker_killed", rule=self._name(job), num_items=len(job.items), cpu_s=cpu_s, wall_s=wall_s)
        self._remove(worker)
        self._dispatch()

    def ended(self, worker: Worker) -> None:
        """See `Owner`."""
        job = worker.held[0] if worker.held else None
        if job is None and worker.num_done == 0:
            self._not_started(worker, f"they end at once ({_how(worker.code)})")
            return
        if job is not None:
            job.num_crashes += 1
            self._on_loss(self._crash(worker.code).reason)
            log.warning("worker_died", rule=self._name(job), how=_how(worker.code), num_items=len(job.items))
            if job.is_prepare:
                self._set_broken(worker, job.rule, f"{self._name(job)}: {_how(worker.code)} while it was loaded")
            if len(job.items) != 1 or worker.num_done == 0 or job.num_crashes > 1:  # else it may not be to blame
                self._give_up(job, self._crash(worker.code))
        self._remove(worker)
        self._dispatch()

    def _give_up(self, job: Job, failure: Failure) -> None:
        """A job failed: of a batch each item is asked alone, so that only those to blame fail."""
        if len(job.items) > 1:
            self._queue.extendleft(reversed(alone(job)))
        else:
            job.fail(failure)

    def _not_started(self, worker: Worker, why: str) -> None:
        """A worker that never worked: nothing that it held is to blame, and the next one is forked after a pause."""
        self._problem = f"worker processes do not start: {why}; see the log of the service"
        self._fork_after_s = asyncio.get_running_loop().time() + RESTART_S
        log.error("workers_do_not_start", why=why)
        self._remove(worker)
        self._dispatch()

    # -- work -------------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give the workers what waits."""
        if self._is_closed or self._link is None or not self._ready.is_set():
            return
        self._fill()
        while self._queue:
            job = self._queue[0]
            if not job.is_over and (broken := self._broken_now(job.rule)) is not None:
                job.fail(Failure("exception", broken))
            if job.is_over:
                self._queue.popleft()
                continue
            worker = min(self._usable(), key=lambda worker: len(worker.held), default=None)
            if worker is None or len(worker.held) >= WINDOW:
                return
            self._give(worker, self._queue.popleft())
        self._steal()

    def _steal(self) -> None:
        """Workers without work take what lies behind slow items."""
        idle = [worker for worker in self._usable() if not worker.held]
        if not idle:
            return
        now_s, is_soon = asyncio.get_running_loop().time(), False
        for victim in sorted(self._workers.values(), key=lambda worker: worker.head_since_s):
            loading = {job.rule for job in islice(victim.held, 1) if job.is_prepare}
            behind = (job for job in islice(victim.held, 1, None) if job.num_holders == 1 and not job.is_over)
            for job in [job for job in behind if not job.is_prepare]:
                if idle and job.rule in loading - idle[-1].prepared:
                    continue  # it would have to load the rule as well: nothing won, and what hangs would hang twice
                if now_s - victim.head_since_s < STEAL_AFTER_S:
                    is_soon = True
                    break
                if not idle:
                    return
                self._give(idle.pop(), job)
        if is_soon:
            self._dispatch_after(STEAL_AFTER_S)

    def _give(self, worker: Worker, job: Job) -> None:
        if job.rule not in worker.prepared:
            self._give_prepare(worker, job.rule)
        worker.give(job)

    def _give_prepare(self, worker: Worker, number: int) -> Job:
        worker.prepared.add(number)
        rule = self._rule_at[number]
        is_batch = rule.batch_items is not None
        message = Prepare(next_number(), number, rule.function, rule.params_json, rule.prepare, is_batch)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        job = Job(number, encode(message), self._start_timeout_s, [future])
        worker.give(job)
        return job

    def _remove(self, worker: Worker) -> None:
        """Kill a worker; what it held and nobody else holds goes back to the front."""
        if self._workers.pop(worker.number, None) is None:
            return
        if self._link is not None:
            self._link.kill(worker.number)
        for job in reversed(worker.drop()):
            if job.is_prepare:
                job.fail(Failure("crashed", f"its worker ended ({_how(worker.code)})"))
            elif not job.is_over and job.num_holders == 0:
                self._queue.appendleft(job)

    def _usable(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.is_connected and not worker.is_retired]

    def _broken_now(self, number: int) -> str | None:
        sentence, again_s = self._broken.get(number, (None, 0.0))
        return sentence if asyncio.get_running_loop().time() < again_s else None

    def _set_broken(self, worker: Worker, number: int, sentence: str) -> None:
        worker.prepared.discard(number)
        self._broken[number] = (sentence, asyncio.get_running_loop().time() + BROKEN_S)

    def _crash(self, code: int | None) -> Failure:
        if code == EXIT_OUT_OF_MEMORY:
            return Failure("out_of_memory", f"it needs more than {self._max_memory_bytes} bytes of memory")
        return Failure("crashed", f"the worker died ({_how(code)})")

    def _number(self, rule: WorkerRule) -> int:
        number = self._rules.setdefault(rule.key, len(self._rules))
        self._rule_at.setdefault(number, rule)
        return number

    def _name(self, job: Job) -> str:
        return self._rule_at[job.rule].function

    # -- processes --------------------------------------------------------------------------------------------------

    async def _launch(self) -> None:
        self._ready.clear()
        self._link = NurseryLink(
            max_memory_bytes=self._max_memory_bytes, on_message=self._hear, on_end=self._nursery_ended
        )
        try:
            await asyncio.wait_for(self._ready.wait(), NURSERY_START_S)
        except TimeoutError:
            await self._link.close()
            self._link = None
            self._problem = f"the nursery of the worker processes did not start within {NURSERY_START_S:g} s"
            raise UnavailableError(self._problem) from None
        self._problem = ""
        self._dispatch()

    def _hear(self, message: FromNursery) -> None:
        if isinstance(message, Ready):
            self._ready.set()
        elif isinstance(message, Shared):
            future = self._shared.get(message.rule)
            if future is not None and not future.done():
                future.set_result(message.error)
        elif isinstance(message, Forked) and (worker := self._workers.get(message.worker)) is not None:
            worker.pid = message.pid
        elif isinstance(message, Exited) and (worker := self._workers.get(message.worker)) is not None:
            if message.code is None:
                self._not_started(worker, "they cannot be forked")
            else:
                worker.exited(message.code)

    def _nursery_ended(self) -> None:
        """All workers end with it; nothing that they held is to blame."""
        if self._is_closed:
            return
        self._problem = "the nursery of the worker processes has died; it is started again"
        self._ready.clear()
        log.error("nursery_died")
        for worker in list(self._workers.values()):
            self._remove(worker)
        self._run(self._relaunch())

    async def _relaunch(self) -> None:
        async with self._starting:
            if self._link is not None:
                await self._link.close()
                self._link = None
        shared = list(self._shared)
        self._shared.clear()
        while True:
            await asyncio.sleep(RESTART_S)
            try:
                await self.start()
                break
            except UnavailableError as error:
                log.error("nursery_does_not_start", detail=str(error))
        for number in shared:
            await self._share(number)
        self._dispatch()

    async def _share(self, number: int) -> None:
        """Load a rule in the nursery, and replace the workers that are older than that."""
        rule = self._rule_at[number]
        if number not in self._shared and self._link is not None:
            self._shared[number] = asyncio.get_running_loop().create_future()
            self._link.share(Share(number, rule.function, rule.params_json, rule.prepare))
        try:
            error = await asyncio.wait_for(asyncio.shield(self._shared[number]), self._start_timeout_s)
        except (TimeoutError, KeyError):
            error = f"{rule.function} was not loaded within {self._start_timeout_s:g} s"
        if error is not None:
            self._shared.pop(number, None)
            self._broken[number] = (error, asyncio.get_running_loop().time() + BROKEN_S)
            return
        for worker in list(self._workers.values()):
            if number not in worker.prepared:
                worker.is_retired = True
                if not worker.held:
                    self._remove(worker)

    def _fill(self) -> None:
        """Fork what is missing."""
        wait_s = self._fork_after_s - asyncio.get_running_loop().time()
        if wait_s > 0:
            self._dispatch_after(wait_s)
            return
        while len(self._workers) < self._num_workers and self._link is not None:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            worker = Worker(self._next_worker, self, {n for n, future in self._shared.items() if future.done()})
            self._workers[worker.number] = worker
            self._next_worker += 1
            with theirs:
                self._link.fork(worker.number, theirs)
            self._run(self._connect(worker, ours))

    async def _connect(self, worker: Worker, end: socket.socket) -> None:
        await worker.connect(end)
        if worker.number not in self._workers:
            worker.drop()
        self._dispatch()

    def _run(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _dispatch_after(self, delay_s: float) -> None:
        def again() -> None:
            self._again = None
            self._dispatch()

        if self._again is None:
            self._again = asyncio.get_running_loop().call_later(delay_s, again)


def _outcome(said: OutcomeMessage) -> Outcome:
    if said.reason is not None:
        return Failure(said.reason, said.detail)  # type: ignore[arg-type]  # a worker says what we say
    return 1.0 if said.score is None else said.score


def _how(code: int | None) -> str:
    """How a process ended."""
    if code is None:
        return "its exit code is not known"
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    return f"killed by {name}, as the kernel does when memory runs out" if name == "SIGKILL" else f"killed by {name}"
