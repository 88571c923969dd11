"""A rank that is executed and not forked runs its script as one that was forked does: how it ends is told in its slot.

    python -u .../holdfast/client/boot/executed_rank.py script TRAIN.PY ARGS...
    python -u .../holdfast/client/boot/executed_rank.py FOLDER MODULE ARGS...  # as with -m, FOLDER first on sys.path

It is executed by its path, and imports little: a file in the working directory or beside it may have any name.
"""

import sys

SCRIPT = "script"


def main() -> None:
    own = __file__.rpartition("/holdfast/client/")[0]
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file
    sys.path.insert(0, own)
    from holdfast.client.boot.script_runner import run_script
    from holdfast.linux.process_control import set_command_line

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
