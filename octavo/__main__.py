"""Where the process begins: `octavo`, or `python -m octavo`."""

from __future__ import annotations

import signal


def main() -> None:
    """The command line. A Ctrl-C before it is even read ends the process, without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where a parent wants it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from octavo.cli import main as command

    signal.signal(signal.SIGINT, before)
    command()


if __name__ == "__main__":
    main()
