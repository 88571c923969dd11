"""Runs the script of a rank that was executed instead of forked, and records in its slot how the script ended.

    python -u .../holdfast/client/boot/executed_rank.py script TRAIN.PY ARGS...
    python -u .../holdfast/client/boot/executed_rank.py FOLDER MODULE ARGS...  # as with -m, FOLDER first on sys.path

This file is executed by its path and imports little, because a file beside it or in the working directory may have
the name of any module.
"""

import sys

SCRIPT = "script"


def main() -> None:
    own = __file__.rpartition("/holdfast/client/")[0]
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file
    sys.path.insert(0, own)
    from holdfast.client.boot.script_runner import run_script
    from holdfast.linux.own_process_settings import set_command_line

    sys.path.remove(own)
    # A script that imports it does so for the first time: what it had imported before is looked at then.
    del sys.modules["holdfast"]
    kind, *argv = sys.argv[1:]
    module = kind != SCRIPT
    with open("/proc/self/environ", "rb") as environ:
        shown = environ.read().decode(errors="surrogateescape").rstrip("\0").split("\0")
    set_command_line([sys.executable, "-u", *(["-m"] if module else []), *argv], shown)
    run_script(argv, module, kind if module else "")


if __name__ == "__main__":
    main()
