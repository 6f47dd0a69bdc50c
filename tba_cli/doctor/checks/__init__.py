"""The checks of `tba doctor`, by name. Each yields results; every request that it sends has a deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tba_cli.doctor.checks.machine import check_disk, check_gpu
from tba_cli.doctor.checks.models import check_models
from tba_cli.doctor.checks.security import check_tokens
from tba_cli.doctor.checks.services import check_releases, check_rewards, check_services
from tba_cli.doctor.checks.store import check_store
from tba_cli.doctor.target import CheckResult, Target

Check = Callable[[Target], Iterator[CheckResult]]

CHECKS: Mapping[str, Check] = {
    "releases": check_releases,
    "gpu": check_gpu,
    "disk": check_disk,
    "tokens": check_tokens,
    "store": check_store,
    "models": check_models,
    "services": check_services,
    "rewards": check_rewards,
}
