"""Test the guards of conftest.py."""

from __future__ import annotations

import socket

import pytest


def test_connection_to_the_network_fails_the_test() -> None:
    with (
        socket.socket() as connection,
        pytest.raises(pytest.fail.Exception, match="tests use no network"),
    ):
        connection.connect(("192.0.2.1", 80))


def test_sockets_between_processes_are_allowed() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        one.sendall(b"x")
        assert other.recv(1) == b"x"
