"""Which releases are installed here, and which the services run."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from typing import Literal

import tba
from tba.doctor.finding import Finding, fail, ok
from tba.doctor.patient import Answer, Patient

LIBRARIES = ("torch", "transformers", "vllm", "pydantic", "boto3", "redis", "datasets")


def probe_releases(patient: Patient) -> Iterator[Finding]:
    """Releases of tba and of what it stands on."""
    versions = {name: _version(name) for name in LIBRARIES}
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    own = ", ".join(sorted(patient.services))
    yield ok("release", f"tba {tba.__version__} ({own}), Python {platform.python_version()}, {libraries}")
    services: tuple[Literal["buffer", "reward"], ...] = ("buffer", "reward")
    for service in services:
        answer = patient.ask(service, "/version")
        found = answer.json() if isinstance(answer, Answer) and answer.status == 200 else None
        if not isinstance(found, dict):
            continue  # the probe of the services says why
        version, run = found.get("version"), found.get("run")
        if version != tba.__version__:
            yield fail(
                "release-services",
                f"the {service} service runs tba {version}, and here is {tba.__version__}",
                "run one release everywhere: give all images one tag",
            )
        elif run != patient.recipe.run.name:
            yield fail(
                "release-run",
                f"the {service} service at {patient.url(service)} belongs to run {run!r}, and this recipe is "
                f"{patient.recipe.run.name!r}",
                f"correct {service}.url, or give the services one recipe",
            )
        else:
            yield ok("release-services", f"the {service} service runs tba {version} for run {run!r}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
