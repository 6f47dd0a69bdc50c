"""Run the contract of the engines against a real SGLang server: `python tools/check_sglang.py`.

    python tools/check_sglang.py --python /opt/sglang/bin/python [--json FILE] [-- --attention-backend fa3 ...]

`--python` is that of an environment with SGLang, which may be another one than tba's; what follows `--` goes to the
server. Without a GPU give `--device cpu --attention-backend torch_native --sampling-backend pytorch
--disable-overlap-schedule --mem-fraction-static 0.05`. The server gets a tiny model in float32, which this makes.
Prints a row for docs/searcher.md; the exit code is 1 where a test failed or none ran.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
from pathlib import Path

from check_vllm import run

TESTS = ("tests/integration/searcher/test_searcher_openai.py", "-k", "sglang")


def main(argv: list[str] | None = None) -> int:
    """Run the tests; return 0, or 1 where something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", type=Path, default=Path(sys.executable), metavar="FILE", help="has SGLang")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the failures to this file")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="of the server, after --")
    args = parser.parse_args(argv)
    version = "import importlib.metadata as m; print(m.version('sglang'))"
    found = subprocess.run([args.python, "-c", version], capture_output=True, text=True, check=False)
    if found.returncode:
        parser.error(
            f"{args.python} has no SGLang: {found.stderr.strip().splitlines()[-1]}; name one that has by --python"
        )
    command = shlex.join([str(args.python), "-m", "sglang.launch_server", *args.options])
    num_passed, failures = run(TESTS, {"TBA_TEST_SGLANG": command})
    print("| SGLang | contract | tried |\n|---|---|---|")
    cell = f"{num_passed} passed" + (f", {len(failures)} failed" if failures else "")
    print(f"| {found.stdout.strip()} | {cell} | {datetime.datetime.now(datetime.UTC).date()} |")
    if args.json:
        args.json.write_text(json.dumps(failures, indent=1))
    return 0 if num_passed and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
