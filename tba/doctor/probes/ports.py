"""Ports that the services of this machine listen on: free, or taken by the service itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tba.doctor.finding import Finding, fail, ok, skip
from tba.doctor.patient import Answer, Patient, http_get
from tba.errors import ConfigError
from tba.local.ports import PortRequest, choose_ports
from tba.loopback import is_loopback

Listening = Literal["buffer", "reward"]


def probe_ports(patient: Patient) -> Iterator[Finding]:
    """Each port that a service of this machine listens on."""
    services: tuple[Listening, ...] = ("buffer", "reward")
    for service in services:
        if service not in patient.services:
            continue
        section = patient.recipe.buffer if service == "buffer" else patient.recipe.reward
        where = f"{section.host}:{section.port} ({service}.port)"
        if section.port == 0:
            yield skip("port", f"{service}.port is 0: `tba run` picks a free one")
            continue
        try:
            choose_ports([PortRequest(f"{service}.port", section.host, section.port)])
        except ConfigError as error:
            if _is_service(patient, service):
                yield ok("port", f"{where}: the {service} service listens there")
            else:
                yield fail("port", str(error), f"end that process, or choose another {service}.port")
        else:
            yield ok("port", f"{where} is free")
        has_tokens = patient.is_local or patient.recipe.auth.tokens_file is not None  # `tba run` makes its own
        if not is_loopback(section.host) and not has_tokens:
            yield fail(
                "port-open",
                f"{service}.host is {section.host}, and there is no auth.tokens_file: the service refuses to start",
                "set auth.tokens_file, or listen on 127.0.0.1",
            )


def _is_service(patient: Patient, service: Listening) -> bool:
    section = patient.recipe.buffer if service == "buffer" else patient.recipe.reward
    own = f"{patient.recipe.tls.scheme}://127.0.0.1:{section.port}"
    answers = [patient.ask(service, "/version"), http_get(f"{own}/version", ca_file=patient.recipe.tls.ca_file)]
    bodies = [answer.json() for answer in answers if isinstance(answer, Answer)]
    return any(isinstance(body, dict) and str(body.get("service", "")).endswith(service) for body in bodies)
