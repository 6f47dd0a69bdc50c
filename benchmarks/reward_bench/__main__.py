"""`python -m benchmarks.reward_bench`: compare the pool of worker processes with pebble's (pools.py).

A `__main__` inside a package is not imported again by each process of multiprocessing, as a script would be.
"""

import sys

from benchmarks.reward_bench.pools import main

if __name__ == "__main__":
    sys.exit(main())
