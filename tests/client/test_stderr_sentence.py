"""A sentence of ours never ends a rank."""

import errno
import io
import os
import sys

import pytest

from holdfast.client.training.stderr_sentence import say


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_whoever_takes_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    say("step 3 was restored")
    assert capsys.readouterr().err == "holdfast: step 3 was restored\n"
    closed = io.StringIO()
    closed.close()
    for stream in (FullDisk(), closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        say("nobody hears it, and training goes on")
