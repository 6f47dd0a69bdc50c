"""The contract package stays importable without the heavy libraries."""

import subprocess
import sys

EVERY_MODULE = """
import importlib, pkgutil, sys
import tba
for module in pkgutil.walk_packages(tba.__path__, "tba."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
bad = sorted({"torch", "transformers", "vllm", "matplotlib"} & set(sys.modules))
sys.exit(f"heavy modules imported: {bad}" if bad else 0)
"""


def test_all_of_tba_imports_without_torch():
    done = subprocess.run([sys.executable, "-c", EVERY_MODULE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
