"""A rank that makes a step a second and rests in between, until it is told to end."""

import time

import holdfast

if __name__ == "__main__":
    for step in range(1, 1 << 30):
        holdfast.step(step)
        time.sleep(1)
