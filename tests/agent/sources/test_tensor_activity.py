"""How busy tensor cores are, through a driver whose samples tests set."""

import pytest

from holdfast.agent.sources.gpu import GpuSource
from holdfast.agent.sources.tensor_activity import GAUGE
from holdfast.model.observation import Gauge
from tests.agent.fake_nvml import FakeNvml


class Scene:
    def __init__(self, *tensor_s: tuple[float, float]) -> None:
        self.nvml, self.now = FakeNvml(2), 100.0
        self.nvml.tensor_s = list(tensor_s)
        self.source = GpuSource(self.nvml, lambda: self.now)

    def after(self, seconds: float, *worked_s: float) -> dict[str, float]:
        """What is read when the tensor cores of each GPU have worked for so long in the meantime."""
        self.now += seconds
        was = self.nvml.tensor_s
        self.nvml.tensor_s = [(a + more, b + seconds) for (a, b), more in zip(was, worked_s, strict=True)]
        return {s.of: s.value for s in self.source.read() if isinstance(s, Gauge) and s.name == GAUGE}


def test_each_reading_is_of_the_time_since_the_one_before() -> None:
    scene = Scene((5.0, 50.0), (0.0, 50.0))
    assert scene.after(10.0, 4.0, 0.0) == {"GPU 0": pytest.approx(40.0), "GPU 1": 0.0}
    assert scene.after(10.0, 9.0, 1.0) == {"GPU 0": pytest.approx(90.0), "GPU 1": pytest.approx(10.0)}


def test_a_reading_that_comes_too_soon_is_the_one_before() -> None:
    scene = Scene((0.0, 0.0))
    assert scene.after(0.2, 0.2) == {}, "there is none yet"
    assert scene.after(9.8, 4.8) == {"GPU 0": pytest.approx(50.0)}
    assert scene.after(0.2, 0.2) == {"GPU 0": pytest.approx(50.0)}
    assert scene.after(0.8, 0.0) == {"GPU 0": pytest.approx(20.0)}, "no part of the time is lost"


def test_a_gpu_that_cannot_tell_is_not_asked() -> None:
    scene = Scene((0.0, 0.0))  # of two
    assert scene.after(10.0, 1.0).keys() == {"GPU 0"}
    assert [GAUGE in gpu.asks for gpu in scene.source.gpus] == [True, False]


def test_an_nvml_without_these_functions_tells_all_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in vars(FakeNvml) if "gpm" in name.lower()]:
        monkeypatch.delattr(FakeNvml, name)
    scene = Scene((0.0, 0.0), (0.0, 0.0))
    assert scene.after(10.0, 1.0, 1.0) == {}
    assert {s.of for s in scene.source.read() if isinstance(s, Gauge) and s.name == "gpu.power_w"} == {"GPU 0", "GPU 1"}


def test_a_driver_that_refuses_is_not_asked_again() -> None:
    scene = Scene((0.0, 0.0))
    scene.nvml.gpm_code = scene.nvml.NVML_ERROR_NOT_SUPPORTED
    assert scene.after(10.0, 1.0) == {}
    assert GAUGE not in scene.source.gpus[0].asks


def test_counters_that_have_not_moved_say_nothing() -> None:
    scene = Scene((0.0, 0.0))
    scene.now += 10.0
    assert not [s for s in scene.source.read() if isinstance(s, Gauge) and s.name == GAUGE]
    assert scene.after(10.0, 5.0) == {"GPU 0": pytest.approx(50.0)}
