"""Run a command that builds the extension and show the progress: files compiled, seconds, name of the latest file.

    python cpp/progress.py COMMAND...

In a terminal one line is rewritten; elsewhere a line is printed every ten seconds. If the command fails, the end of its
output follows.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

LAST_LINES = 40
STEP = re.compile(r"\[(\d+)/(\d+)\] (?:Building|Linking) CXX.*?(?:kernels_(\w+)\.dir/.*?)?([\w.-]+?)(?:\.o)?\s*$")


def main(command: list[str]) -> int:
    """Return the exit status of the command."""
    terminal, start, shown = sys.stdout.isatty(), time.monotonic(), 0.0
    lines: list[str] = []
    last = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines = [*lines[1 - LAST_LINES :], line]
            step = STEP.search(line)
            if not step:
                continue
            last, seconds = step, time.monotonic() - start
            if not terminal and seconds - shown < 10:
                continue
            shown = seconds
            for_isa = f" for {step[3]}" if step[3] else ""
            text = f"  compiled {step[1]} of {step[2]} files, {seconds:.0f} s: {step[4]}{for_isa}"
            print(f"\r\x1b[K{text}" if terminal else text, end="" if terminal else "\n", flush=True)
    seconds = time.monotonic() - start
    if terminal and last:
        print("\r\x1b[K", end="")
    if process.returncode:
        print("".join(lines), end="")
    else:
        print(f"  compiled {last[2]} files in {seconds:.0f} s" if last else f"  nothing to compile, {seconds:.0f} s")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
