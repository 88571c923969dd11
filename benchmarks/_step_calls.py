"""Times single calls of holdfast.step, as a training script makes them."""

import json
import statistics
import sys
import time
from pathlib import Path

import holdfast
from holdfast.client.training.progress import here

CALLS, WARM = 20_000, 1_000


def main() -> None:
    took = []
    for step in range(CALLS):
        loss = 1.0 / (step + 1)
        began = time.perf_counter_ns()
        holdfast.step(step, loss=loss)
        took.append(time.perf_counter_ns() - began)
    cuts = statistics.quantiles(took[WARM:], n=100)
    found = {"attached": here.find_slot() is not None, "median_us": cuts[49] / 1e3, "p99_us": cuts[98] / 1e3}
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
