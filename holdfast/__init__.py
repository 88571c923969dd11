"""Holdfast keeps large PyTorch training jobs productive while machines fail; here are the verbs a script uses.

    holdfast.attach(ddp)                      # the same sums in every generation, so that a resume is exact
    holdfast.step(n, loss=loss)               # the step that is done
    with holdfast.phase("eval"): ...          # what the rank is at, when it is not training
"""

from holdfast.client.progress import here as _here

__version__ = "0.1.0"
__all__ = ["attach", "phase", "step"]

attach = _here.attach
step = _here.step
phase = _here.phase
