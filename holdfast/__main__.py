"""Entry point of `python -m holdfast`, for environments in which the `holdfast` command is not on the PATH."""

import os
import sys

if not sys.flags.safe_path:
    sys.path[0] = os.devnull  # in the working directory may be a file with the name of a module that we need

from holdfast.cli import main

sys.exit(main())
