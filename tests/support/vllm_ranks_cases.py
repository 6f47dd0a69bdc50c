"""Cases for the vLLM engine with two ranks, and a process that runs them and some of engine_contract.py. All use one
engine, except the case in 8 bits.

`python -m tests.support.vllm_ranks_cases FOLDER` prints, as its last line, {case: "passed" or a traceback}.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tba_searcher.engines.engine import Engine, EngineDiedError, EngineError
from tba_searcher.engines.vllm.engine import VllmEngine, VllmSettings
from tba_searcher.engines.weight_check import swap_weights

from tba.errors import ConfigError
from tba.versions import START, PolicyVersion
from tests.support.engine_contract import (
    V1,
    Bench,
    case_a_bad_version_is_refused_and_the_old_one_back,
    case_staged_weights_are_used_like_any_others,
    case_tokens_and_logprobs_are_the_trainers,
    case_weights_in_flight_begin_a_span,
    finish,
    make_requests,
    raised,
    run_all,
    tokens_of,
)
from tests.support.vllm_cases import SIZES, Benches, print_outcomes
from tests.support.vllm_eight_bits_cases import EIGHT_BITS, LEAST_GAP, PROMPT, RESPONSE, calmer, mean_gaps

NUM_RANKS = 2
DEATH_DEADLINE_S = 15.0
"""Longest time from the end of a rank to the error, on a busy machine."""


SHARED_MEMORY, LEFT_BEHIND = Path("/dev/shm"), "vllm_dist_*-cpushm_*"
"""Shared memory files of vLLM, which it does not unlink when a rank is killed."""


def make_ranks(folder: Path, tensors: Path, version: PolicyVersion, dtype: str, **settings: Any) -> Engine:
    """Return a vLLM engine with two ranks."""
    both = VllmSettings(**SIZES, seed=1, dtype=dtype, tensor_parallel_size=NUM_RANKS, **settings)
    return VllmEngine(folder, [tensors], version, both)


def break_the_next_load(worker: Any) -> None:
    """Make the next read of tensors fail half-way on the last rank, once; this function is called in every rank."""
    from tba_searcher.engines.vllm import weights

    hashed: Any = weights.HashedTensors
    whole = hashed.__iter__

    def breaks_off(tensors: Any) -> Any:
        for number, item in enumerate(whole(tensors)):
            if number == 4:
                hashed.__iter__ = whole
                raise OSError("the disk is gone")
            yield item

    if worker.rank == NUM_RANKS - 1:
        hashed.__iter__ = breaks_off


def case_a_load_that_fails_on_one_rank_leaves_the_old_version_on_all(bench: Bench) -> None:
    requests = make_requests(6, temperatures=(0.0,), seed=5)
    old = bench.local(bench.old, START)
    new = bench.local(bench.new, V1)
    with bench.engine() as engine:
        assert isinstance(engine, VllmEngine)
        engine._llm.collective_rpc(break_the_next_load)
        assert "rank 1 of 2: OSError: the disk is gone" in raised(EngineError, engine.stage_weights, new.paths)
        engine._llm.collective_rpc(break_the_next_load)
        error = swap_weights(engine, new, old)
        assert isinstance(error, EngineError)
        assert not isinstance(error, EngineDiedError)
        assert "rank 1 of 2: OSError: the disk is gone" in str(error)
        # rank 0 had the new weights; both have the old ones now, and no answer is left over in a queue
        engine.verify(old.manifest)
        assert tokens_of(run_all(engine, requests)) == {r.request_id: bench.old.greedy(r) for r in requests}
        assert swap_weights(engine, new, old) is None
        assert tokens_of(run_all(engine, requests)) == {r.request_id: bench.new.greedy(r) for r in requests}


def case_gpus_take_their_slices_from_the_mapped_files(bench: Bench) -> None:
    requests = make_requests(4, temperatures=(0.0,), seed=6)
    with bench.engine() as engine:
        assert isinstance(engine, VllmEngine)
        engine._workers.call("tba_open_staging", False, doing="a test")  # as on GPUs
        engine.stage_weights([bench.new.tensors])
        # a load that reads the files anew would fail: what is staged is used
        engine._llm.collective_rpc(break_the_next_load)
        engine.load_weights([bench.new.tensors], V1)
        engine.verify(bench.manifest(bench.new, V1))
        assert tokens_of(run_all(engine, requests)) == {r.request_id: bench.new.greedy(r) for r in requests}
        raised(EngineError, engine.load_weights, [bench.old.tensors], START)  # the one that was to fail
        engine.load_weights([bench.old.tensors], START)


def case_a_model_that_the_ranks_cannot_share_is_refused_before_they_start(bench: Bench) -> None:
    settings = VllmSettings(**SIZES, seed=1, tensor_parallel_size=3)
    error = raised(ConfigError, lambda: VllmEngine(bench.old.folder, [bench.old.tensors], START, settings))
    assert "tensor_parallel_size is 3, and 3 ranks cannot share the 4 attention heads" in error


def case_a_rank_that_is_killed_ends_the_engine_at_once(bench: Bench) -> None:
    """Kill a rank while the engine decodes and the ranks wait for each other at every layer."""
    requests = make_requests(4, eos_ids=(), max_response_tokens=40)
    engine = bench.spare or bench.fresh()
    assert isinstance(engine, VllmEngine)
    process_ids = engine._workers.process_ids
    assert len(process_ids) == NUM_RANKS
    os.kill(process_ids[0], signal.SIGTERM)  # as to the whole group of the searcher: it drains with its ranks
    killed_at_s: list[float] = []

    def kill() -> None:
        killed_at_s.append(time.monotonic())
        os.kill(process_ids[1], signal.SIGKILL)

    def decode() -> None:
        for round_number in range(1000):
            for request in requests:
                engine.submit(request)
            while engine.num_active + engine.num_waiting:
                engine.step()
            if round_number == 0:
                threading.Timer(0.1, kill).start()

    error = raised(EngineDiedError, decode)
    assert "rank 1 of 2 ended with SIGKILL" in error, error
    assert time.monotonic() - killed_at_s[0] < DEATH_DEADLINE_S
    # a load finds out as well, and none is left behind
    raised(EngineDiedError, engine.load_weights, [bench.new.tensors], V1)
    engine.close()
    until = time.monotonic() + DEATH_DEADLINE_S
    while any(Path(f"/proc/{process_id}").exists() for process_id in process_ids):
        assert time.monotonic() < until
        time.sleep(0.05)


def case_ranks_round_their_slices_to_8_bits_and_wait_for_none(bench: Bench) -> None:
    """The last rank fails half-way, during decoding and without it; the other rank must not wait for its scales."""
    old, new = (calmer(bench, model) for model in (bench.old, bench.new))
    engine = bench.fresh(old, dtype="bfloat16", section=EIGHT_BITS)
    assert isinstance(engine, VllmEngine)
    start = engine.canary_logprobs(PROMPT, RESPONSE)
    for request in make_requests(2, eos_ids=(), max_response_tokens=12):
        engine.submit(request)

    def stage_beside_decoding() -> None:
        with ThreadPoolExecutor(1) as beside:
            staging = beside.submit(engine.stage_weights, [new.tensors])
            while not staging.done():
                engine.step()
            staging.result()

    engine._llm.collective_rpc(break_the_next_load)
    assert "rank 1 of 2: OSError: the disk is gone" in raised(EngineError, stage_beside_decoding)
    engine._llm.collective_rpc(break_the_next_load)
    raised(EngineError, engine.load_weights, [new.tensors], V1)
    engine.load_weights([old.tensors], START)
    stage_beside_decoding()
    engine.load_weights([new.tensors], V1)
    of_new, of_old = mean_gaps(engine, [new, old])
    assert LEAST_GAP < of_new < of_old / 2
    list(finish(engine))
    engine.load_weights([old.tensors], START)
    np.testing.assert_array_equal(engine.canary_logprobs(PROMPT, RESPONSE), start)
    engine.close()


RANK_CASES = {
    case.__name__.removeprefix("case_"): case
    for case in (
        case_tokens_and_logprobs_are_the_trainers,
        case_weights_in_flight_begin_a_span,
        case_staged_weights_are_used_like_any_others,
        case_a_bad_version_is_refused_and_the_old_one_back,
        case_a_load_that_fails_on_one_rank_leaves_the_old_version_on_all,
        case_gpus_take_their_slices_from_the_mapped_files,
        case_ranks_round_their_slices_to_8_bits_and_wait_for_none,
        case_a_model_that_the_ranks_cannot_share_is_refused_before_they_start,
        case_a_rank_that_is_killed_ends_the_engine_at_once,
    )
}


def main(root: Path) -> None:
    shared = set(SHARED_MEMORY.glob(LEFT_BEHIND))
    try:
        print_outcomes({name: ("llama tied", case) for name, case in RANK_CASES.items()}, Benches(make_ranks, root))
    finally:
        for path in set(SHARED_MEMORY.glob(LEFT_BEHIND)) - shared:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
