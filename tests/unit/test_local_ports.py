"""Ports: free ones, and who holds a taken one."""

from __future__ import annotations

import os
import socket

import pytest

from tba.errors import ConfigError
from tba_cli.ports import PortRequest, choose_ports, port_owner


def any_port(key: str) -> PortRequest:
    return PortRequest(key, "127.0.0.1", 0)


def test_port_0_becomes_different_free_ports():
    ports = choose_ports([any_port("a"), any_port("b"), any_port("c")])
    assert len(set(ports)) == 3
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_port_in_use_is_one_sentence_with_its_owner_and_what_to_do():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError) as error:
            choose_ports([any_port("a"), PortRequest("buffer.port", "127.0.0.1", port)])
        assert f"port {port} (buffer.port) is in use by process {os.getpid()} (" in str(error.value)
        assert "--set buffer.port=0" in str(error.value)


def test_two_services_cannot_share_a_port():
    port = choose_ports([any_port("a")])[0]
    with pytest.raises(ConfigError, match=rf"port {port} \(reward.port\) is in use"):
        choose_ports([PortRequest("buffer.port", "127.0.0.1", port), PortRequest("reward.port", "127.0.0.1", port)])


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match="cannot listen on"):
        choose_ports([PortRequest("buffer.port", "192.0.2.1", 0)])


def test_nobody_owns_a_free_port():
    assert port_owner(choose_ports([any_port("a")])[0]) == "another process"
