"""Cost of the buffer's in-memory index: build, apply, draw, memory; no Redis, no HTTP, one process.

    python benchmarks/bench_index.py [--json FILE] [--large] [--repeats N]

Each size runs in a process of its own, so that its resident memory is its own. Times are CPU time of the thread, the
median of `--repeats` calls; every `apply` is a new event, every draw has its own seed.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "services" / "buffer")]

from tba_buffer.index.log import RECORD_DTYPE, Evicted, Publication, RolloutsAdded  # noqa: E402
from tba_buffer.index.rollout_index import Index, IndexSettings  # noqa: E402
from tba_buffer.sampling.mop import DrawSettings, draw_rollouts, draw_slots  # noqa: E402

from tba.versions import PolicyVersion  # noqa: E402

PUSH = 64
READ = 1000 * PUSH
SIZES = (10_000, 100_000, 1_000_000)
LARGE = 10_000_000
ROLLOUTS_PER_PROMPT = 16
DRAWS = {
    "uniform, 64 x 8": {"prompts_per_batch": 64, "group_size": 8},
    "softmax, 64 x 8": {"prompts_per_batch": 64, "group_size": 8, "inverse_temperature": 1.0, "uniform_share": 0.1},
    "softmax, 16 x 32": {"prompts_per_batch": 16, "group_size": 32, "inverse_temperature": 1.0, "uniform_share": 0.1},
    "softmax, replacement": {
        "prompts_per_batch": 64,
        "group_size": 8,
        "inverse_temperature": 1.0,
        "uniform_share": 0.1,
        "replacement": True,
    },
    "across, 64 x 8": {
        "prompts_per_batch": 64,
        "group_size": 8,
        "inverse_temperature": 1.0,
        "uniform_share": 0.1,
        "prioritise": "across",
    },
}
MOST_ON_POLICY_PROB = 0.5


def make_records(num: int, num_prompts: int, *, first: int = 0, seed: int = 0) -> np.ndarray:
    """Records [num]: visits of 8 rollouts, prompts in turn, a tenth of the rewards continuous, the others 0 or 1."""
    rng = np.random.default_rng(seed)
    records = np.zeros(num, dtype=RECORD_DTYPE)
    records["rollout_id"] = np.frombuffer(rng.bytes(16 * num), dtype="V16")
    records["reward"] = np.where(rng.random(num) < 0.1, rng.random(num), rng.integers(0, 2, num))
    records["prompt"] = (first + np.arange(num)) // 8 * 7919 % num_prompts
    records["step"] = (first + np.arange(num)) // 4096
    records["num_bytes"], records["num_tokens"] = 4096, 512
    return records


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def median_s(call: Callable[[int], object], repeats: int) -> float:
    """Median seconds of call(0), call(1), ...; the first two are not counted."""
    seconds = []
    for number in range(repeats + 2):
        start = time.thread_time()
        call(number)
        seconds.append(time.thread_time() - start)
    return float(np.median(seconds[2:]))


def write_records(path: Path, num: int, num_prompts: int) -> None:
    """A file of records, so that the process that is measured never holds them all."""
    make_records(num, num_prompts).tofile(path)


def measure(path: Path, num: int, num_prompts: int, repeats: int) -> dict[str, float]:
    """All figures of one size: seconds, and bytes per rollout."""
    figures: dict[str, float] = {}
    before = resident_bytes()
    index = Index(IndexSettings())
    figures["build from tail"] = 0.0
    with path.open("rb") as file:
        for first in range(0, num, READ):
            pushes = []
            for at in range(first, min(first + READ, num), PUSH):
                packed = file.read(RECORD_DTYPE.itemsize * min(PUSH, num - at))
                pushes.append(RolloutsAdded(at + 1, np.frombuffer(packed, dtype=RECORD_DTYPE)))
            start = time.thread_time()
            index.apply_many(pushes)
            figures["build from tail"] += time.thread_time() - start
    del pushes, packed
    gc.collect()
    figures["bytes per rollout, index"] = (resident_bytes() - before) / num

    more = make_records(2 * PUSH * (repeats + 2), num_prompts, first=num, seed=1)
    for _ in range(2):  # the rollouts pushed below are recent
        index.apply(Publication(index.position + 1, PolicyVersion(0, index.position)))

    def push(number: int) -> None:
        index.apply(RolloutsAdded(index.position + 1, more[number * PUSH : (number + 1) * PUSH]))

    def evict(_: int) -> None:
        positions = index.column("position", index.oldest_rows(PUSH))
        index.apply(Evicted(index.position + 1, positions, "max_rollouts"))

    figures["apply push of 64"] = median_s(push, repeats)
    figures["apply evict of 64"] = median_s(evict, repeats)
    start = time.thread_time()
    index.apply(Publication(index.position + 1, PolicyVersion(0, index.position)))
    figures["mark"] = time.thread_time() - start
    for name, values in DRAWS.items():
        draw_settings = DrawSettings(most_on_policy_prob=MOST_ON_POLICY_PROB, **values)
        figures["draw " + name] = median_s(lambda seed, s=draw_settings: draw_slots(index, s, seed), repeats)
    figures["bytes per rollout, trees too"] = (resident_bytes() - before) / num
    figures["bytes per rollout, arrays alone"] = index.memory_bytes() / num
    flat = DrawSettings(prompts_per_batch=1, group_size=512, inverse_temperature=1.0, uniform_share=0.1)
    figures["draw flat, 512"] = median_s(lambda seed: draw_rollouts(index, flat, 512, seed), repeats)

    def push_and_draw(number: int) -> None:
        push(number + repeats + 2)
        draw_rollouts(index, flat, 64, number)

    figures["push of 64 and draw flat, 64"] = median_s(push_and_draw, repeats)
    start = time.thread_time()
    base = index.checkpoint()
    figures["write a base"] = time.thread_time() - start
    rebuilt = Index(IndexSettings())
    start = time.thread_time()
    rebuilt.restore(base)
    figures["build from base"] = time.thread_time() - start
    return figures


def run(size: int, num_prompts: int, repeats: int) -> dict[str, float]:
    """`measure` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records"
        with context.Pool(1) as pool:
            pool.apply(write_records, (path, size, num_prompts))
        with context.Pool(1) as pool:
            return pool.apply(measure, (path, size, num_prompts, repeats))


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--large", action="store_true", help="also 10,000,000 rollouts (needs about 4 GB)")
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    sizes = (*SIZES, LARGE) if arguments.large else SIZES
    results = []
    for size in sizes:
        for num_prompts in (size // ROLLOUTS_PER_PROMPT, 1):
            figures = run(size, num_prompts, arguments.repeats)
            results.append({"rollouts": size, "prompts": num_prompts, **figures})
            print(f"measured {size} rollouts of {num_prompts} prompts", file=sys.stderr)
    print_table(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


def print_table(results: list[dict[str, float]]) -> None:
    """One column per size, one line per figure."""
    columns = [f"{int(result['rollouts']):.0e}/{int(result['prompts'])}" for result in results]
    print(f"{'(rollouts/prompts)':34}" + "".join(f"{column:>14}" for column in columns))
    for name in results[0]:
        if name in ("rollouts", "prompts"):
            continue
        is_bytes = name.startswith("bytes")
        cells = [f"{result[name]:.0f} B" if is_bytes else f"{1e3 * result[name]:.3f} ms" for result in results]
        print(f"{name:34}" + "".join(f"{cell:>14}" for cell in cells))


if __name__ == "__main__":
    main()
