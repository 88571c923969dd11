"""What programs of the outside world put before their lines."""

import pytest

from tests.core.words.knowing import said

BOOM = "RuntimeError: boom"


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("(VllmWorker rank=2 pid=1870) ERROR 09-03 22:14:51 [multiproc_executor.py:511] ", 2),
        ("(EngineCore_DP0 pid=812) ERROR 10-01 10:00:00 [core.py:700] ", None),
        ("(VllmWorkerProcess pid=21) ERROR 05-12 10:11:02 multiproc_worker_utils.py:242] ", None),
        ("[2025-10-21 08:33:50 TP5] ", 5),
        ("[2025-10-21 08:33:50 DP1 TP5 EP5] ", 5),
        ("(head, rank=3, pid=5208) ", 3),
        ("(raylet) ", None),
        ("(autoscaler +1m2s) ", None),
        ("[NeMo E 2024-08-02 09:13:40 utils:215] ", None),
        ("05/01/2024 10:22:33 - ERROR - root - ", None),
        ("[05/01/24 10:22:33] ERROR    ", None),
        ("10:22:33 | ERROR | ", None),
        ("E20240501 10:22:33.123456 12345 file.cc:12] ", None),
        ("submitit ERROR (2021-06-09 03:11:22,847) - ", None),
        ("[ERROR] 2024-05-01-10:22:33 (PID:33, Device:0, RankID:6) ", 6),
        ("[TensorRT-LLM][ERROR] ", None),
        ("[gpu3] ", 3),
        ("> ", None),
    ],
)
def test_prefixes_are_gone(line: str, rank: int | None) -> None:
    (one,) = said(line + BOOM)
    assert (one.text, one.rank) == (BOOM, rank)


@pytest.mark.parametrize(
    "line",
    ["[  +0.000005] ", "kern  :err   : [Tue Mar  4 02:11:09 2025] ", "kern: warning: [2026-02-09T03:14:41.21Z]: "],
)
def test_lines_of_the_kernel(line: str) -> None:
    (one,) = said(f"{line}nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028")
    assert one.kernel and one.text.startswith("nvidia-nvswitch0")


def test_frames_keep_their_indent() -> None:
    (one,) = said('ERROR 09-03 22:14:53 [core.py:632]   File "/opt/x.py", line 623, in run')
    assert one.text == '  File "/opt/x.py", line 623, in run'


def test_a_traceback_that_somebody_put_into_one_line() -> None:
    head, frame, raised = said(r'x: "Traceback (most recent call last):\n  File \"/w/a.py\", line 3, in f\nKeyError: 1')
    assert (frame.text, raised.text) == ('  File "/w/a.py", line 3, in f', "KeyError: 1")
    assert head.text.startswith("x: ")
