"""Which host of a job listens at the endpoint, when all hosts run the same command."""

import socket
from typing import Any

import pytest

from holdfast.cli.launch.controller_listener import listen_to_lead
from holdfast.cli.run_flags.flag_table import UsageError

ELSEWHERE, ELSEWHERE_6 = "192.0.2.7", "2001:db8::7"  # kept for documents: no host has them


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def resolve(patch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Have every name stand for these addresses, in this order."""

    def found(host: str, port: int, **_: Any) -> list[Any]:
        kinds = (
            (socket.AF_INET6, (one, port, 0, 0)) if ":" in one else (socket.AF_INET, (one, port)) for one in addresses
        )
        return [(family, socket.SOCK_STREAM, 6, "", address) for family, address in kinds]

    patch.setattr(socket, "getaddrinfo", found)


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_of_several_hosts_is_refused_by_each_of_them(
    port: int, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    """Each host finds its own address among them: both would run a controller."""
    resolve(monkeypatch, *("127.0.0.1", ELSEWHERE)[::order])
    with pytest.raises(UsageError, match=r"^ctl .* 192\.0\.2\.7 .* 127\.0\.0\.1: .* --journal"):
        listen_to_lead("ctl", port)


@pytest.mark.parametrize(
    "addresses", [("127.0.0.1",), ("127.0.0.2", "127.0.0.1"), (ELSEWHERE_6, "127.0.0.1"), ("127.0.0.1", ELSEWHERE_6)]
)
def test_all_addresses_of_one_host_are_one_host(
    port: int, monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]
) -> None:
    """Names have addresses of IPv6 that their hosts do not use."""
    resolve(monkeypatch, *addresses)
    listener = listen_to_lead("ctl", port)
    assert listener is not None
    with listener:
        own = next(address for address in addresses if address.startswith("127."))
        assert listener.getsockname() == (own, port)
        assert listen_to_lead("ctl", port) is None, "another process of this host listens there"


def test_the_name_of_another_host(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, ELSEWHERE, ELSEWHERE_6)
    assert listen_to_lead("ctl", port) is None


def test_no_name_at_all() -> None:
    with pytest.raises(UsageError, match=r" no-such-host\.invalid"):
        listen_to_lead("no-such-host.invalid", 1)
