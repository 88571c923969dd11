"""A controller is built in one place, and a wire that is forgotten is an error there."""

from pathlib import Path

import msgspec
import pytest

from holdfast.config import Settings
from holdfast.controller.composition import build_controller
from holdfast.controller_interfaces import ControllerPorts
from tests.controller.conftest import make_ports


def test_a_port_that_is_forgotten_is_an_error(tmp_path: Path) -> None:
    ports = msgspec.structs.asdict(make_ports(tmp_path))
    for name in ports:
        with pytest.raises(TypeError, match=name):
            ControllerPorts(**{other: port for other, port in ports.items() if other != name})
    ports["journal"].close()


async def test_all_parts_share_what_they_share(tmp_path: Path) -> None:
    ports = make_ports(tmp_path)
    controller, ingest, tracing, links, certificates = build_controller(Settings(), ports)
    assert ingest.controller is controller and ingest.tracing is tracing and ingest.certificates is certificates
    assert controller.executor.links is controller.links is ingest.links is links
    assert controller.executor.registry is controller.registry is ingest.registry
    assert controller.executor.view is controller.view is ingest.view
    assert links.epoch == ports.journal.epoch
    ports.journal.close()
