"""Measure the CPU seconds for compiling each file of the extension in a new folder.

    python benchmarks/build.py [--out benchmarks/records/build.jsonl] [--jobs 2] [--source FOLDER]

It needs cmake, ninja and nanobind, which `make setup` installs. CMake runs this program as compiler
launcher, and it records the user time. On a busy machine user time grows too, so compare two builds
in parallel.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

LOG = "TERSEKV_BUILD_LOG"


def launch(command: list[str]) -> int:
    """Run the compiler and record its user seconds under the name of the object file."""
    status = subprocess.run(command).returncode
    made = next((word for word in command if word.endswith(".o")), "")
    with Path(os.environ[LOG]).open("a") as file:
        file.write(json.dumps([made, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime]) + "\n")
    return status


def build(source: Path, jobs: int) -> dict[str, float]:
    """Return user seconds per file. Files compiled for one instruction set have its name as prefix."""
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name) / "log"
        tools = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", LOG: str(log)}
        launcher = f"{sys.executable};{Path(__file__).resolve()};--launch"
        configure = ["cmake", "-G", "Ninja", "-S", str(source), "-B", f"{folder}/native", "-DCMAKE_BUILD_TYPE=Release"]
        configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}"]
        subprocess.run(configure, check=True, env=os.environ | tools, stdout=subprocess.DEVNULL)
        command = ["cmake", "--build", f"{folder}/native", f"-j{jobs}"]
        subprocess.run(command, check=True, env=os.environ | tools, stdout=sys.stderr)
        for line in log.read_text().splitlines():
            made, user = json.loads(line)
            isa = re.search(r"kernels_(\w+)\.dir", made)
            file = "nanobind" if "nanobind-static" in made else Path(made).name.removesuffix(".o")
            file = f"{isa[1]}/{file}" if isa else file
            seconds[file] = seconds.get(file, 0.0) + user
    return seconds


def main() -> None:
    if sys.argv[1:2] == ["--launch"]:
        sys.exit(launch(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1], help="folder of another version")
    parser.add_argument("--label", default="", help="label in the record")
    parser.add_argument("--out", type=Path, help="append a JSON line to this file")
    options = parser.parse_args()
    seconds = build(options.source, options.jobs)
    largest = sorted(seconds.items(), key=lambda item: -item[1])
    table = Table("file", "CPU s", title=f"compiling the extension: {sum(seconds.values()):.0f} CPU seconds")
    for file, user in largest[:15]:
        table.add_row(file, f"{user:.1f}")
    Console().print(table)
    if options.out:
        compiler = subprocess.getoutput("c++ --version").splitlines()[0]
        record = {"bench": "build", "label": options.label, "compiler": compiler, "jobs": options.jobs}
        record |= {"cpu_seconds": round(sum(seconds.values()), 1), "load": round(os.getloadavg()[0], 1)}
        with options.out.open("a") as out:
            out.write(json.dumps(record | {"files": {file: round(user, 1) for file, user in largest}}) + "\n")


if __name__ == "__main__":
    main()
