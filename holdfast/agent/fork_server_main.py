"""The fork server with a masked log: wire/program_fork_server.py has what it does.

python -u -m holdfast.agent.fork_server_main FD PARENT ...
"""

import logging
import sys
from typing import NoReturn

from holdfast.linux import preimported_fork
from holdfast.logs.secret_masking import keep_masked_log, make_secret_masker
from holdfast.wire import program_fork_server


def main() -> NoReturn:
    keep_masked_log(logging.StreamHandler(sys.stderr), make_secret_masker())
    program_fork_server.main()


if __name__ == "__main__":
    preimported_fork.run(main)
