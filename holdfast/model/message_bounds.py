"""Bounds of numbers and texts in messages from other processes; a message that exceeds them is rejected.

The numbers of an honest node are far smaller. The bounds ensure that the journal can store what the controller computes
from two such numbers.
"""

from typing import Annotated

import msgspec

MOST = 1 << 53  # larger integers are not exact as floats
MOST_REAL = 1e60
MOST_S = 1e12

Number = Annotated[int, msgspec.Meta(ge=-MOST, le=MOST)]
Real = Annotated[float, msgspec.Meta(ge=-MOST_REAL, le=MOST_REAL)]  # neither infinite nor NaN
Instant = Annotated[float, msgspec.Meta(ge=-2 * MOST_S, le=2 * MOST_S)]
Duration = Annotated[float, msgspec.Meta(ge=0.0, le=2 * MOST_S)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]
SocketPath = Annotated[str, msgspec.Meta(max_length=4096)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
ExitCode = Annotated[int, msgspec.Meta(ge=0, le=255)]
