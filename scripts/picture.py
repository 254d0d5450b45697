"""Writes what a program shows in a terminal as a picture (SVG), for the documentation.

    python scripts/picture.py docs/inspection.svg python scripts/inspect_data.py recipes/qwen3-8b-invoice --show 1 ...
    python scripts/picture.py --columns 100 --last 40 check.svg python scripts/check.py --machine

The program runs in a pseudo-terminal of --columns columns, so that it prints with its colours. --last N keeps the last N
lines. The exit code is the program's.
"""

import argparse
import io
import os
import pty
import re
import struct
import sys
import termios
from fcntl import ioctl
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

HIDDEN = re.compile(r"(\[WARNING\]|transformers|torch|kernels|Warning|warnings\.warn|\[A|it/s\]|examples/s\])")


def shown(command: list[str], columns: int) -> tuple[int, str]:
    """(exit code, everything the program printed to its terminal)."""
    printed = io.BytesIO()
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the program has ended
            break
        if not part:
            break
        printed.write(part)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), printed.getvalue().decode("utf-8", "replace")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--columns", type=int, default=110)
    parser.add_argument("--last", type=int, default=60, help="lines that are kept")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    code, text = shown(asked.command, asked.columns)
    # What a line shows in the end: progress bars write over themselves.
    lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]
    lines = [line for line in lines if not HIDDEN.search(line)]
    console = Console(record=True, width=asked.columns, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("\n".join(lines[-asked.last :]).strip("\n")))
    title = " ".join(asked.command)
    picture = console.export_svg(title=title if len(title) < 90 else title[:90] + " ...", theme=MONOKAI)
    # No font from the network: a picture on a page may not load any.
    asked.picture.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
