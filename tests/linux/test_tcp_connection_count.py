"""Connections to a port, as the kernel lists them."""

import socket
from pathlib import Path

import pytest

from holdfast.linux.tcp_connection_count import count_connections


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_only_those_of_others_to_the_port_count(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"there is no {host} here")
        listener.listen()
        port = listener.getsockname()[1]
        assert count_connections(port) == 0, "who listens is none"
        with socket.create_connection((host, port)) as caller:
            own = caller.getsockname()[1]
            assert count_connections(port) == 1, "also before it is accepted"
            assert count_connections(own) == 1, "the other end"
            accepted, _ = listener.accept()
            with accepted:
                assert count_connections(port) == 1
        assert count_connections(port) == 0


def test_a_kernel_that_lists_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        count_connections(1, tmp_path)
    (tmp_path / "tcp").write_text("  sl  local_address rem_address   st\n")
    assert count_connections(1, tmp_path) == 0, "nor need it have IPv6"
