"""A cache file is written completely or not at all, and a damaged one is never read.

Tested are every flipped byte, every length, writers killed at any moment, and a full disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tersekv
from conftest import prompt
from tersekv.cache import tensor_file
from tersekv.errors import UserError

TENSORS = {
    "codes": torch.arange(100, dtype=torch.uint8),
    "scale": torch.linspace(-1, 1, 12).half().view(3, 1, 4),
    "bf16": torch.ones(5, dtype=torch.bfloat16),
    "none": torch.empty(2, 0, 3),
    "flags": torch.tensor([True, False]),
    "weight": torch.tensor(0.5, dtype=torch.float64),
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    tensor_file.write(tmp_path / "small", TENSORS, {"what": "a test, “quoted”"})
    return tmp_path / "small"


def test_round_trip(small):
    said, tensors, size = tensor_file.read(small)
    assert said["what"] == "a test, “quoted”"
    assert size == small.stat().st_size
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor, TENSORS[name])
    before = small.read_bytes()
    tensors["codes"].zero_()  # copy on write: the file stays
    assert small.read_bytes() == before
    tensor_file.write(small.with_name("again"), TENSORS, {"what": "a test, “quoted”"})
    assert small.with_name("again").read_bytes() == before


def test_every_flipped_byte_is_detected(small):
    data = small.read_bytes()
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        small.write_bytes(flipped)
        with pytest.raises(UserError, match="small"):
            tensor_file.read(small)


def test_every_wrong_length_is_detected(small):
    data = small.read_bytes()
    for length in range(len(data)):
        small.write_bytes(data[:length])
        with pytest.raises(UserError, match="small"):
            tensor_file.read(small)
        with pytest.raises(UserError, match="small"):
            tensor_file.read_said(small)
    small.write_bytes(data + b"\0")
    with pytest.raises(UserError, match="has data after its end"):
        tensor_file.read(small)


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "cache"
    with tersekv.compress(models["llama"], "kvquant:calibration=prompt"), torch.no_grad():
        models["llama"](prompt(150)).past_key_values.save(path, prompt(150))
    return path


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_cache_is_never_loaded(llama, whole, where, mask, cut):
    data = whole.read_bytes()
    place = int(where * len(data))
    damaged = data[:place] if cut else data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]
    path = whole.with_name("damaged")
    path.write_bytes(damaged)
    with pytest.raises(UserError, match="damaged"):
        tersekv.CompressedCache.load(path, llama)


def test_other_files(small, tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(UserError, match=r"cannot read .*: No such file"):
        tensor_file.read(tmp_path / "none")
    save_file({"x": torch.ones(3)}, tmp_path / "other")
    with pytest.raises(UserError, match="is not a cache, or its header is damaged"):
        tensor_file.read(tmp_path / "other")
    (tmp_path / "text").write_text("a" * 5000)
    with pytest.raises(UserError, match="is cut off or is not a cache"):
        tensor_file.read(tmp_path / "text")


def test_another_format(small, monkeypatch):
    monkeypatch.setattr(tensor_file, "FORMAT", 2)
    with pytest.raises(UserError, match="has format 1; this version reads format 2"):
        tensor_file.read(small)


# ---------------------------------------------------------------- writers that do not come to their end

WRITER = """
import os, random, resource, signal, sys, time
from pathlib import Path
import torch
from tersekv.errors import UserError
from tersekv.cache import tensor_file

path = Path(sys.argv[1])
old, new = ({"x": torch.full((500_000,), value)} for value in (1.0, 2.0))
tensor_file.write(path.with_name("new"), new, {})
tensor_file.write(path, old, {})
whole = path.read_bytes(), path.with_name("new").read_bytes()

def forked(child):
    pid = os.fork()
    if not pid:
        try:
            child()
        finally:
            os._exit(0)
    return pid

def killed_at(name, after):
    call = getattr(os, name)
    def dies(*arguments, **options):
        if after:
            call(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(os, name, dies)
    tensor_file.write(path, new, {})

for name in ("fdopen", "fsync", "chmod", "replace"):
    for after in (False, True):
        tensor_file.write(path, old, {})
        assert os.WIFSIGNALED(os.waitpid(forked(lambda: killed_at(name, after)), 0)[1])
        assert path.read_bytes() == whole[name == "replace" and after]
random.seed(0)
for first in (True, False):
    for _ in range(15):
        if first:
            path.unlink(missing_ok=True)
        else:
            tensor_file.write(path, old, {})
        pid = forked(lambda: [tensor_file.write(path, each, {}) for _ in range(99) for each in (new, old)])
        time.sleep(random.random() / 50)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if path.exists() or not first:
            assert path.read_bytes() in whole

def too_large():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        tensor_file.write(path, new, {})
    except UserError as error:
        print(error)

tensor_file.write(path, old, {})
left = set(path.parent.iterdir())
sys.stdout.flush()
def speaks():
    too_large()
    sys.stdout.flush()
os.waitpid(forked(speaks), 0)
assert path.read_bytes() == whole[0]
assert set(path.parent.iterdir()) == left
print("abandoned:", sum(p.name.endswith(".part") for p in left))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_and_failing_writers_leave_the_old_file_or_none(tmp_path):
    path = tmp_path / "cache"
    out = subprocess.run([sys.executable, "-c", WRITER, str(path)], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    said = out.stdout.splitlines()
    assert said[0] == f"cannot write {path}: File too large; free some space there, or give another place"
    assert int(said[1].split()[1]) >= 6  # left by the killed ones
    tensor_file.write(path, TENSORS, {})
    parts = [left for left in tmp_path.iterdir() if left.name.endswith(".part")]
    assert parts  # too new to count as abandoned
    for left in parts:
        os.utime(left, (0, 0))
    tensor_file.write(path, TENSORS, {})
    assert {left.name for left in tmp_path.iterdir()} == {"cache", "new"}


def test_a_full_disk(small, monkeypatch):
    before = small.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*small: No space left on device; free some space there"):
        tensor_file.write(small, TENSORS, {})
    assert small.read_bytes() == before
    assert [path.name for path in small.parent.iterdir()] == ["small"]


def test_another_writer_is_left_alone(small):
    """A file that is being written is locked, so it is kept whatever its age."""
    fcntl = pytest.importorskip("fcntl")
    other = small.with_name(".small.abc.part")
    with other.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(other, (0, 0))
        tensor_file.write(small, TENSORS, {})
        assert other.exists()
    tensor_file.write(small, TENSORS, {})
    assert not other.exists()
