"""One probe per file; each yields findings, and asks the world only with deadlines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tba.doctor.finding import Finding
from tba.doctor.patient import Patient
from tba.doctor.probes.certificates import probe_certificates
from tba.doctor.probes.clocks import probe_clocks
from tba.doctor.probes.disk import probe_disk
from tba.doctor.probes.gpu import probe_gpu
from tba.doctor.probes.models import probe_hub, probe_models
from tba.doctor.probes.ports import probe_ports
from tba.doctor.probes.redis import probe_redis
from tba.doctor.probes.releases import probe_releases
from tba.doctor.probes.rewards import probe_rewards
from tba.doctor.probes.services import probe_services
from tba.doctor.probes.store import probe_store
from tba.doctor.probes.tokens import probe_tokens

Probe = Callable[[Patient], Iterator[Finding]]

PROBES: Mapping[str, Probe] = {
    "releases": probe_releases,
    "gpu": probe_gpu,
    "disk": probe_disk,
    "ports": probe_ports,
    "tokens": probe_tokens,
    "certificates": probe_certificates,
    "redis": probe_redis,
    "store": probe_store,
    "models": probe_models,
    "hub": probe_hub,
    "services": probe_services,
    "rewards": probe_rewards,
    "clocks": probe_clocks,
}
