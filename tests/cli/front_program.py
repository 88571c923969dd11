"""Commands of holdfast for a fork server to fork: its exit code goes to the file that is named first."""

import os
import sys
from pathlib import Path

from holdfast.agent import process_holder
from holdfast.cli import main as holdfast
from holdfast.cli.run_dirs import run_selection  # noqa: F401 - so that they need not be imported again


def prepare() -> None:
    process_holder.prepare()


def main() -> int:
    try:
        code = holdfast(sys.argv[2:])
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    whole = Path(f"{sys.argv[1]}.{os.getpid()}")
    whole.write_text(str(code))
    whole.replace(sys.argv[1])
    return code


if __name__ == "__main__":
    sys.exit(main())
