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


def test_the_test_above_can_fail():
    broken = EVERY_MODULE.replace(
        "import tba\n", "import tba, types\nsys.modules['torch'] = types.ModuleType('torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "torch" in done.stderr
