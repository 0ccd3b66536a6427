"""GGUF files that are damaged, missing, on the Hub, or converted while something goes wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError

from made_gguf import leftovers
from made_gguf import path as path
from tersekv import UserError, cli
from tersekv.models import gguf_file, loading
from tersekv.models import pull as pulling

pytestmark = pytest.mark.usefixtures("empty_cache")


# ---------------------------------------------------------------- damaged files


def replace(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert content.count(old) >= 1
    path.write_bytes(content.replace(old, new, 1))


def header_length(path: Path, value: int) -> None:
    """Set the length of the first key of the metadata."""
    content = bytearray(path.read_bytes())
    content[24:32] = struct.pack("<Q", value)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda p: p.write_bytes(b""), "is not a GGUF file (it is empty)"),
        (lambda p: p.write_bytes(b"GGUF"), "not a whole GGUF file (4 bytes)"),
        (lambda p: p.write_bytes(b"PK\x03\x04" * 99), r"is not a GGUF file (it begins with b'PK\x03\x04')"),
        (lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]), "bytes instead of"),
        (lambda p: p.write_bytes(p.read_bytes()[:3000]), "its header ends after the file"),
        (lambda p: p.write_bytes(p.read_bytes()[:-200]), "bytes instead of"),
        (lambda p: replace(p, b"GGUF\x03", b"GGUF\x01"), "its version is 1, readable are 2 and 3"),
        (lambda p: header_length(p, 1 << 62), "its header ends after the file"),
        (lambda p: replace(p, b"general.architecture", b"general.architectura"), "does not name its architecture"),
        (lambda p: replace(p, b"token_embd", b"token_embx"), "has no token_embd.weight"),
        (lambda p: replace(p, b"<|im_start|>", b"\xff\xfe_start|>"), ""),
    ],
    ids=[
        *("empty", "magic-only", "foreign", "half", "half-header", "short", "version", "huge-key", "no-architecture"),
        *("no-embedding", "odd-token"),
    ],
)
def test_damaged_files_are_refused_in_one_line(
    path: Path, empty_cache: Path, capfd: pytest.CaptureFixture[str], harm: Any, said: str
) -> None:
    harm(path)
    with pytest.raises(UserError) as caught:
        loading.load(str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert leftovers(empty_cache) == []
    if said:
        assert cli.run(["estimate", "--model", str(path)]) == 2
        err = capfd.readouterr().err
        assert said in " ".join(err.split())
        assert "Traceback" not in err


@pytest.mark.parametrize("seed", range(4))
def test_any_wrong_byte_of_the_header_gives_a_model_or_a_sentence(path: Path, seed: int) -> None:
    content, drawn = path.read_bytes(), np.random.default_rng(seed)
    for at in drawn.integers(4, 12_000, 60):
        harmed = bytearray(content)
        harmed[at] ^= int(drawn.integers(1, 256))
        path.write_bytes(harmed)
        with contextlib.suppress(UserError):
            assert gguf_file.read(path).architecture


@pytest.mark.parametrize("name", ["./nowhere.gguf", "nowhere.gguf", "owner/nowhere.gguf"])
def test_a_file_that_is_not_there(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        UserError, match=r"is not there: give its path, or a file on the Hub like owner/name:file\.gguf"
    ):
        loading.load(name)
    assert cli.run(["estimate", "--model", name]) == 2
    assert "is not there" in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize("command", ["models pull {}", "models verify {}", "estimate --model {}"])
def test_a_file_that_may_not_be_read(
    path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    opened = Path.open

    def refused(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == path:
            raise PermissionError(13, "Permission denied")
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refused)
    assert cli.run(command.format(path).split()) == 2
    assert "Permission denied; give a GGUF file that you can read" in " ".join(capfd.readouterr().err.split())


def test_pulling_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder, which is used as it is: give one of smollm2, or a GGUF file"):
        loading.pull(str(tmp_path))


# ---------------------------------------------------------------- the Hub


def test_files_on_the_hub(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def download(repo: str, file: str) -> str:
        asked.append((repo, file))
        return str(path)

    loading._from_hub.cache_clear()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    model, _ = loading.load("owner/some.name-1:sub/q4.gguf")
    assert asked == [("owner/some.name-1", "sub/q4.gguf")]
    assert model.config.num_hidden_layers == 3
    loading._from_hub.cache_clear()


def test_hub_that_cannot_be_reached() -> None:
    """Tests run with HF_HUB_OFFLINE."""
    with pytest.raises(UserError, match=r"cannot get the model 'owner/name:q4\.gguf' from the Hub") as caught:
        loading.load("owner/name:q4.gguf")
    said = str(caught.value)
    assert "hf download owner/name q4.gguf --local-dir FOLDER" in said
    assert "--model FOLDER/q4.gguf" in said


# ---------------------------------------------------------------- interruptions

CONVERT = """
    import sys, time
    from tersekv.models import loading, pull
    convert = pull.convert
    def slowly(path, target):
        done = convert(path, target)
        (target / "ready").touch()
        time.sleep({seconds})
        (target / "ready").unlink()
        return done
    pull.convert = slowly
    loading.pull({path!r}, report=lambda line: print(line, flush=True))
"""


def start(path: Path, seconds: float) -> subprocess.Popen[str]:
    code = textwrap.dedent(CONVERT).format(path=str(path), seconds=seconds)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_killed_conversion_leaves_nothing_that_is_used(path: Path, empty_cache: Path) -> None:
    process = start(path, 600)
    for _ in range(1200):
        if list((empty_cache / "models").glob(".*partial*/model/ready")):
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len(leftovers(empty_cache)) == 1
    assert not list((empty_cache / "models").glob("gguf-*"))
    loading.load(str(path))
    assert loading.damage(str(path), verify=True) is None
    assert leftovers(empty_cache) == []


def test_two_conversions_at_once(path: Path) -> None:
    pytest.importorskip("fcntl", reason="the lock needs fcntl")
    both = [start(path, 2) for _ in range(2)]
    said = [process.communicate(timeout=240)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("converting" in text for text in said) == 1, said
    assert loading.damage(str(path), verify=True) is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "No space left"),
        (SafetensorError("I/O error: full"), "I/O error: full"),
    ],
)
def test_full_disk(path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(pulling, "convert", full)
    with pytest.raises(UserError, match=rf"cannot store the model in .*{said}.*TERSEKV_CACHE"):
        loading.load(str(path))
    assert leftovers(empty_cache) == []


def test_too_little_space_is_found_before_converting(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "convert", lambda *_: pytest.fail("converted"))
    monkeypatch.setattr(pulling, "stored_bytes", lambda _: 1 << 60)
    with pytest.raises(UserError, match=r"(MB|GB) are free; it needs about 1152921504\.6 GB"):
        loading.load(str(path))


def test_damage_is_repaired(path: Path) -> None:
    folder = loading.pull(str(path))
    (folder / "tokenizer.json").unlink()
    lines: list[str] = []
    loading.load(str(path), report=lines.append)
    assert any("tokenizer.json is missing" in line for line in lines)
    assert loading.damage(str(path), verify=True) is None
