"""The pool of worker processes: one queue, a few jobs per worker ahead, a kill at the deadline.

    score() -> queue -> up to PREFETCH_JOBS jobs per worker, done in their order -> replies
                           |  the first one takes more CPU time than it may: it is too slow. Its worker is killed, the
                           |  others go back to the front of the queue, and a new worker is forked. The same happens as
                           |  a timeout where it takes much longer than that in wall-clock time
                           '  the worker dies: the first one is tried once more in another worker, then it has crashed

A rule may take several items at once (`WorkerRule.batch_items`): a batch is one job. When it is slow, runs over its
deadline or its worker dies, it is split into its items. While a job of such a rule, which is foreign code, is slow,
another worker takes its place. Behind HUNG_ITEMS slow ones further items of a prompt wait, and fail when these do.

An idle worker steals the jobs behind a slow item of another one (scoring is safe to repeat; the first outcome counts),
so that a poisoned item delays no other. Waits: an item in the queue waits as long as its request does
(`reward.request_timeout_s`); in a worker at most WALL_SLACK_S more than its deadline.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice

from tba.errors import UnavailableError
from tba.logs import get_logger
from tba_reward.process_pool.fork_server_client import ForkServerClient
from tba_reward.process_pool.job import ItemKey, Job, RuleKey, WorkerRule, load_job, score_job, split_job
from tba_reward.process_pool.pool_messages import (
    FromForkServer,
    OutcomeMessage,
    PreloadRule,
    Reply,
    RulePreloaded,
    ServerReady,
    WorkerExited,
    WorkerForked,
)
from tba_reward.process_pool.worker_handle import WorkerHandle
from tba_reward.process_pool.worker_main import EXIT_OUT_OF_MEMORY
from tba_reward.scorer import OK, Failure, Item, Outcome

PREFETCH_JOBS = 8
"""Jobs that a worker holds, so that it never waits for the next one; of a rule that takes batches, one."""
STEAL_AFTER_S = 0.05
"""An item that takes longer than this is slow: the jobs behind it may be stolen."""
LOAD_AGAIN_S = 30.0
"""A rule that could not be loaded is tried again after this."""
SERVER_START_S = 60.0
SLOW_S = 1.0
"""A job of a rule that takes batches is slow after this, and after twice the longest of its rule."""
MAX_SLOW_WORKERS = 8
"""Workers beyond `num_workers`, in the place of slow ones."""
HUNG_ITEMS, HUNG_S = 2, 60.0
"""When so many items of a prompt have hung, the others fail at once for so long."""
RESTART_S = 1.0
"""Pause before a process that could not be started is started again."""
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
        self._numbers: dict[RuleKey, int] = {}
        self._rules: dict[int, WorkerRule] = {}
        self._load_errors: dict[int, tuple[str, float]] = {}
        """Why rules could not be loaded, and when that is tried again."""
        self._preloads: dict[int, asyncio.Future[str | None]] = {}
        """Rules that the fork server has loaded or loads now; a result is None or an error."""
        self._queue: deque[Job] = deque()
        self._workers: dict[int, WorkerHandle] = {}
        self._next_worker = 0
        self._server: ForkServerClient | None = None
        self._server_ready = asyncio.Event()
        self._start_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dispatch_timer: asyncio.TimerHandle | None = None
        self._slow: set[int] = set()
        """The workers with slow jobs."""
        self._suspects: Counter[ItemKey] = Counter()
        """Prompts: how many items have hung or are slow now."""
        self._longest_s: dict[int, float] = {}
        """By rule: about the longest time that a job has taken lately."""
        self._hung: dict[ItemKey, tuple[int, float]] = {}
        """Prompts: how many items have hung, and until when that counts."""
        self._fork_after_s = 0.0
        self._is_closed = False
        self._problem = "the worker processes are not started"

    async def start(self) -> None:
        """Start the fork server; do nothing where it runs already.

        Raises:
            UnavailableError: it did not answer in time.
        """
        async with self._start_lock:
            if self._server is None and not self._is_closed:
                await self._start_server()

    async def close(self) -> None:
        """End all processes; items that are not scored yet become failures."""
        self._is_closed = True
        self._problem = "the reward service is stopping"
        for task in self._tasks:
            task.cancel()
        held = [job for worker in self._workers.values() for job in worker.release()]
        for job in [*held, *self._queue]:
            job.fail(Failure("unreachable", self._problem))
        self._workers.clear()
        self._queue.clear()
        if self._server is not None:
            await self._server.close()

    async def prepare(self, rule: WorkerRule) -> None:
        """Load a rule in every process that will run it; `health` says whether that went well."""
        number = self._number(rule)
        self._load_errors.pop(number, None)
        if rule.preload:
            await self._preload(number)
        self._dispatch()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # workers that connect
        jobs = [self._submit_load(worker, number) for worker in self._usable() if number not in worker.loaded]
        await asyncio.gather(*(future for job in jobs for future in job.futures))

    def health(self, rule: WorkerRule) -> str:
        """Return `ok`, or why this rule has no workers."""
        error = self._load_errors.get(self._number(rule))
        return error[0] if error is not None else self._problem or OK

    async def score(self, rule: WorkerRule, items: Sequence[Item], timeout_s: float) -> list[Outcome]:
        """Return one outcome per item, in order. When it is cancelled, the workers are free again at once.

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
            # a cancelled request leaves jobs that nobody waits for: their deadline has come nearer
            for worker in list(self._workers.values()):
                worker.watch()

    def _enqueue(
        self, number: int, items: Sequence[Item], timeout_s: float, futures: Sequence[asyncio.Future[Outcome]]
    ) -> None:
        try:
            self._queue.append(score_job(number, items, timeout_s, futures))
        except (TypeError, ValueError, RecursionError) as error:
            # an item that cannot be sent must not take the others of its batch with it
            if len(items) > 1:
                for item, future in zip(items, futures, strict=True):
                    self._enqueue(number, [item], timeout_s, [future])
                return
            futures[0].set_result(Failure("malformed", f"the item cannot be sent to a worker: {error}"))

    # -- events of workers ------------------------------------------------------------------------------------------

    def on_reply(self, worker: WorkerHandle, job: Job, reply: Reply) -> None:
        """See `WorkerCallbacks`."""
        self._problem = ""
        if job.is_load and reply.outcomes[0].reason is None:
            self._load_errors.pop(job.rule, None)
        elif job.is_load:
            self._set_load_error(worker, job.rule, reply.outcomes[0].detail)
        job.settle([_outcome(outcome) for outcome in reply.outcomes])
        if not job.is_load:
            self._longest_s[job.rule] = max(job.took_s, 0.99 * self._longest_s.get(job.rule, 0.0))
        for key in job.prompts if self._hung else ():
            self._hung.pop(key, None)
        self._slow.discard(worker.number)
        is_surplus = len(self._workers) - len(self._slow) > self._num_workers
        # its place is for a worker that has the rule preloaded, or was taken while it was slow
        if (worker.is_retired or is_surplus) and not worker.jobs:
            self._remove(worker)
        self._dispatch()

    def on_deadline(self, worker: WorkerHandle, job: Job, cpu_s: float) -> None:
        """See `WorkerCallbacks`."""
        wall_s = asyncio.get_running_loop().time() - worker.head_since_s
        failure = Failure(
            "timeout", f"no result after {wall_s:.1f} s, {max(cpu_s, 0):.2f} s of CPU time; the worker was killed"
        )
        if job.is_load:
            self._set_load_error(worker, job.rule, f"{self._name(job)} was not loaded within {job.timeout_s:g} s")
        elif cpu_s >= job.timeout_s:
            failure = Failure(
                "too_slow", f"no result after {job.timeout_s:g} s of CPU time, {wall_s:.1f} s; the worker was killed"
            )
        if self._may_hang(job) and len(job.items) == 1 and not job.is_over:
            (key,) = job.prompts
            self._hung[key] = self._hung.get(key, (0, 0.0))[0] + 1, asyncio.get_running_loop().time() + HUNG_S
        self._fail_or_split(job, failure)
        self._on_loss(failure.reason)
        log.warning("worker_killed", rule=self._name(job), num_items=len(job.items), cpu_s=cpu_s, wall_s=wall_s)
        self._remove(worker)
        self._dispatch()

    def on_exit(self, worker: WorkerHandle) -> None:
        """See `WorkerCallbacks`."""
        job = worker.jobs[0] if worker.jobs else None
        # it had nothing to do yet, so that no rule is to blame
        if job is None and worker.num_done == 0:
            self._on_start_failed(worker, f"they end at once ({_describe_exit(worker.code)})")
            return
        if job is not None:
            job.num_crashes += 1
            self._on_loss(self._crash_failure(worker.code).reason)
            how = _describe_exit(worker.code)
            log.warning("worker_died", rule=self._name(job), how=how, num_items=len(job.items))
            if job.is_load:
                self._set_load_error(worker, job.rule, f"{self._name(job)}: {how} while it was loaded")
            # An item that a worker takes up after others may pay for what they did: it is tried once more. The first
            # job of a worker has nobody else to blame, and a batch is split in any case.
            if len(job.items) != 1 or worker.num_done == 0 or job.num_crashes > 1:
                self._fail_or_split(job, self._crash_failure(worker.code))
        self._remove(worker)
        self._dispatch()

    def _fail_or_split(self, job: Job, failure: Failure) -> None:
        """Fail a job; each item of a batch is asked alone, so that only the items to blame fail."""
        if len(job.items) > 1:
            self._split(job)
            job.futures = ()
        else:
            job.fail(failure)

    def _split(self, job: Job) -> None:
        if not job.is_split:
            self._queue.extendleft(reversed(split_job(job)))

    def _on_start_failed(self, worker: WorkerHandle, why: str) -> None:
        """Remove a worker that never worked; the next one is forked after a pause. No job of it is to blame."""
        self._problem = f"worker processes do not start: {why}; see the log of the service"
        self._fork_after_s = asyncio.get_running_loop().time() + RESTART_S
        log.error("workers_do_not_start", why=why)
        self._remove(worker)
        self._dispatch()

    # -- jobs -------------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give the workers the jobs that wait."""
        if self._is_closed or self._server is None or not self._server_ready.is_set():
            return
        held = list[Job]()
        self._find_slow()
        self._fork_missing()
        while self._queue:
            job = self._queue[0]
            if not job.is_over and (error := self._load_error(job.rule)) is not None:
                job.fail(Failure("exception", error))
            if job.is_over:
                self._queue.popleft()
                continue
            num = max((self._suspects[key] for key in job.prompts), default=0) if self._suspects else 0
            if num and (len(job.items) > 1 or num >= HUNG_ITEMS):
                self._queue.popleft()
                if len(job.items) > 1:
                    self._split(job)
                elif any(self._hung.get(key, (0,))[0] >= HUNG_ITEMS for key in job.prompts):
                    prompt = job.items[0].prompt
                    job.fail(Failure("timeout", f"not asked: the last {HUNG_ITEMS} responses to {prompt!r:.60} hung"))
                else:
                    held.append(job)
                continue
            usable = (worker for worker in self._usable() if worker.number not in self._slow)
            worker = min(usable, key=lambda worker: len(worker.jobs), default=None)
            # what no worker holds can go to any of them later; behind what hangs nothing must lie
            if worker is None or len(worker.jobs) >= (1 if self._may_hang(job) else PREFETCH_JOBS):
                break
            self._submit(worker, self._queue.popleft())
        self._queue.extendleft(reversed(held))
        self._steal()

    def _may_hang(self, job: Job) -> bool:
        """Return whether a job calls foreign code."""
        return not job.is_load and self._rules[job.rule].batch_items is not None

    def _find_slow(self) -> None:
        """Find the workers with slow jobs; split the batches among these, and suspect the prompts of the others."""
        now_s = asyncio.get_running_loop().time()
        self._hung = {key: (num, until_s) for key, (num, until_s) in self._hung.items() if now_s < until_s}
        self._slow, self._suspects = set(), Counter({key: num for key, (num, _) in self._hung.items()})
        for worker in self._workers.values():
            if not worker.jobs or not self._may_hang(job := worker.jobs[0]):
                continue
            slow_s = max(SLOW_S, 2 * self._longest_s.get(job.rule, job.timeout_s / 2))
            if (left_s := worker.head_since_s + slow_s - now_s) > 0:
                self._dispatch_after(left_s)
                continue
            self._slow.add(worker.number)
            if len(job.items) > 1:
                self._split(job)
            else:
                self._suspects.update(job.prompts)

    def _steal(self) -> None:
        """Give idle workers the jobs that lie behind slow items."""
        idle = [worker for worker in self._usable() if not worker.jobs]
        if not idle:
            return
        now_s, is_soon = asyncio.get_running_loop().time(), False
        for busy in sorted(self._workers.values(), key=lambda worker: worker.head_since_s):
            loading = {job.rule for job in islice(busy.jobs, 1) if job.is_load}
            behind = (job for job in islice(busy.jobs, 1, None) if job.num_holders == 1 and not job.is_over)
            for job in [job for job in behind if not job.is_load]:
                # the thief would have to load the rule as well: it wins nothing, and an item that hangs hangs twice
                if idle and job.rule in loading - idle[-1].loaded:
                    continue
                if now_s - busy.head_since_s < STEAL_AFTER_S:
                    is_soon = True
                    break
                if not idle:
                    return
                self._submit(idle.pop(), job)
        if is_soon:
            self._dispatch_after(STEAL_AFTER_S)

    def _submit(self, worker: WorkerHandle, job: Job) -> None:
        if job.rule not in worker.loaded:
            self._submit_load(worker, job.rule)
        worker.submit(job)

    def _submit_load(self, worker: WorkerHandle, number: int) -> Job:
        worker.loaded.add(number)
        job = load_job(number, self._rules[number], self._start_timeout_s)
        worker.submit(job)
        return job

    def _remove(self, worker: WorkerHandle) -> None:
        """Kill a worker; the jobs that only it held go back to the front of the queue."""
        if self._workers.pop(worker.number, None) is None:
            return
        if self._server is not None:
            self._server.kill(worker.number)
        for job in reversed(worker.release()):
            if job.is_load:
                job.fail(Failure("crashed", f"its worker ended ({_describe_exit(worker.code)})"))
            # a stolen job stays with its other holder
            elif not job.is_over and job.num_holders == 0:
                self._queue.appendleft(job)

    def _usable(self) -> list[WorkerHandle]:
        return [worker for worker in self._workers.values() if worker.is_connected and not worker.is_retired]

    def _load_error(self, number: int) -> str | None:
        """Return why a rule cannot be loaded, until it is tried again."""
        sentence, again_s = self._load_errors.get(number, (None, 0.0))
        return sentence if asyncio.get_running_loop().time() < again_s else None

    def _set_load_error(self, worker: WorkerHandle, number: int, sentence: str) -> None:
        worker.loaded.discard(number)
        self._load_errors[number] = (sentence, asyncio.get_running_loop().time() + LOAD_AGAIN_S)

    def _crash_failure(self, code: int | None) -> Failure:
        if code == EXIT_OUT_OF_MEMORY:
            return Failure("out_of_memory", f"it needs more than {self._max_memory_bytes} bytes of memory")
        return Failure("crashed", f"the worker died ({_describe_exit(code)})")

    def _number(self, rule: WorkerRule) -> int:
        number = self._numbers.setdefault(rule.key, len(self._numbers))
        self._rules.setdefault(number, rule)
        return number

    def _name(self, job: Job) -> str:
        return self._rules[job.rule].function

    # -- processes --------------------------------------------------------------------------------------------------

    async def _start_server(self) -> None:
        self._server_ready.clear()
        self._server = ForkServerClient(
            max_memory_bytes=self._max_memory_bytes, on_message=self._on_message, on_end=self._on_server_end
        )
        try:
            await asyncio.wait_for(self._server_ready.wait(), SERVER_START_S)
        except TimeoutError:
            await self._server.close()
            self._server = None
            self._problem = f"the fork server of the worker processes did not start within {SERVER_START_S:g} s"
            raise UnavailableError(self._problem) from None
        self._problem = ""
        self._dispatch()

    def _on_message(self, message: FromForkServer) -> None:
        if isinstance(message, ServerReady):
            self._server_ready.set()
        elif isinstance(message, RulePreloaded):
            future = self._preloads.get(message.rule)
            if future is not None and not future.done():
                future.set_result(message.error)
        elif isinstance(message, WorkerForked) and (worker := self._workers.get(message.worker)) is not None:
            worker.pid = message.pid
        elif isinstance(message, WorkerExited) and (worker := self._workers.get(message.worker)) is not None:
            if message.code is None:
                self._on_start_failed(worker, "they cannot be forked")
            else:
                worker.set_exited(message.code)

    def _on_server_end(self) -> None:
        """Start the fork server again; its workers end with it, and none of their jobs is to blame."""
        if self._is_closed:
            return
        self._problem = "the fork server of the worker processes has died; it is started again"
        self._server_ready.clear()
        log.error("fork_server_died")
        for worker in list(self._workers.values()):
            self._remove(worker)
        self._create_task(self._restart_server())

    async def _restart_server(self) -> None:
        async with self._start_lock:
            if self._server is not None:
                await self._server.close()
                self._server = None
        numbers = list(self._preloads)
        self._preloads.clear()
        while True:
            await asyncio.sleep(RESTART_S)
            try:
                await self.start()
                break
            except UnavailableError as error:
                log.error("fork_server_does_not_start", detail=str(error))
        for number in numbers:
            await self._preload(number)
        self._dispatch()

    async def _preload(self, number: int) -> None:
        """Load a rule in the fork server, and replace the workers that were forked before that."""
        rule = self._rules[number]
        if number not in self._preloads and self._server is not None:
            self._preloads[number] = asyncio.get_running_loop().create_future()
            self._server.preload(PreloadRule(number, rule.function, rule.params_json, rule.prepare))
        try:
            # another caller may wait for the same load, which must not be cancelled with this one
            error = await asyncio.wait_for(asyncio.shield(self._preloads[number]), self._start_timeout_s)
        except (TimeoutError, KeyError):
            error = f"{rule.function} was not loaded within {self._start_timeout_s:g} s"
        if error is not None:
            self._preloads.pop(number, None)
            self._load_errors[number] = (error, asyncio.get_running_loop().time() + LOAD_AGAIN_S)
            return
        for worker in list(self._workers.values()):
            if number not in worker.loaded:
                worker.is_retired = True
                if not worker.jobs:
                    self._remove(worker)

    def _fork_missing(self) -> None:
        """Fork workers until there are `num_workers`."""
        wait_s = self._fork_after_s - asyncio.get_running_loop().time()
        # a fork that failed a moment ago would fail again
        if wait_s > 0:
            self._dispatch_after(wait_s)
            return
        num = self._num_workers + min(len(self._slow), MAX_SLOW_WORKERS)
        while len(self._workers) < num and self._server is not None:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            loaded = {number for number, future in self._preloads.items() if future.done()}
            worker = WorkerHandle(self._next_worker, self, loaded)
            self._workers[worker.number] = worker
            self._next_worker += 1
            with theirs:
                self._server.fork(worker.number, theirs)
            self._create_task(self._connect(worker, ours))

    async def _connect(self, worker: WorkerHandle, end: socket.socket) -> None:
        await worker.connect(end)
        # it was removed while it connected: nobody else closes its transport
        if worker.number not in self._workers:
            worker.release()
        self._dispatch()

    def _create_task(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _dispatch_after(self, delay_s: float) -> None:
        def dispatch() -> None:
            self._dispatch_timer = None
            self._dispatch()

        due_s = asyncio.get_running_loop().time() + delay_s
        if self._dispatch_timer is not None and self._dispatch_timer.when() > due_s:
            self._dispatch_timer.cancel()
            self._dispatch_timer = None
        if self._dispatch_timer is None:
            self._dispatch_timer = asyncio.get_running_loop().call_at(due_s, dispatch)


def _outcome(message: OutcomeMessage) -> Outcome:
    if message.reason is not None:
        return Failure(message.reason, message.detail)  # type: ignore[arg-type]  # a worker sends our own reasons
    return 1.0 if message.score is None else message.score


def _describe_exit(code: int | None) -> str:
    """Say how a process ended."""
    if code is None:
        return "its exit code is not known"
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    return f"killed by {name}, as the kernel does when memory runs out" if name == "SIGKILL" else f"killed by {name}"
