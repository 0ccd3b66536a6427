"""The serde inside LMCache: found by name and run by LMCache's own processor on its own memory
objects."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import time

import pytest
import torch

pytest.importorskip("lmcache.v1.distributed.serde", reason="LMCache is not installed (make test-serving)")

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import add_l2_adapters_args, parse_args_to_l2_adapters_config
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor, serialized_layout_desc
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

from tersekv.errors import UserError
from tersekv.serving import lmcache as plugin

KEY = ObjectKey(chunk_hash=b"chunk", model_name="model", kv_rank=0)


@pytest.fixture(autouse=True)
def _registered():
    plugin.register()
    plugin.register()


def memory(layout: MemoryLayoutDesc) -> TensorMemoryObj:
    """Return an empty memory object as LMCache's allocators make them."""
    size = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True))
    meta = MemoryObjMetadata(
        shape=layout.shapes[0], dtype=layout.dtypes[0], address=0, phy_size=size, ref_count=1,
        shapes=layout.shapes, dtypes=layout.dtypes,
    )  # fmt: skip
    return TensorMemoryObj(torch.full((size,), 0x7F, dtype=torch.uint8), meta, None)


def processor(recipe="turboquant:bits=4", **options):
    return create_serde_processor(SerdeConfig("tersekv", {"recipe": recipe, "head_dim": 64, **options}))


def finished(query, *task):
    """Return LMCache's answer once it is available."""
    until = time.monotonic() + 30
    while (done := query(*task)) is None or done == {}:
        assert time.monotonic() < until
        time.sleep(0.01)
    return done


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", ["turboquant:bits=4", "polarquant", "kivi:bits=2;0=exact:dtype=fp32"])
def test_round_trip_through_lmcache(recipe, dtype, sides):
    torch.manual_seed(0)
    layout = MemoryLayoutDesc([torch.Size([sides, 3, 70, 128])], [dtype])
    serde = processor(recipe)
    try:
        source, target = memory(layout), memory(layout)
        source.tensor.copy_(torch.randn(sides, 3, 70, 128))
        packed = memory(serialized_layout_desc(layout, serde))
        assert packed.tensor.numel() == serde.estimate_serialized_size(layout)
        assert finished(serde.query_serialize_result, serde.submit_serialize([source], [packed], [KEY]))
        assert finished(serde.query_deserialize_result, serde.submit_deserialize([packed], [target], [KEY]))
        want = torch.empty_like(source.tensor)
        coder = plugin.ChunkCoder(plugin.Recipe.parse(recipe), 64)
        coder.unpack(coder.pack([source.tensor]), [want])
        assert torch.equal(target.tensor, want)
        error = (target.tensor.float() - source.tensor.float()).norm() / source.tensor.float().norm()
        assert error < (0.6 if "kivi" in recipe else 0.25)
    finally:
        serde.close()


def test_damage_is_a_failed_task():
    layout = MemoryLayoutDesc([torch.Size([2, 1, 32, 64])], [torch.float32])
    serde = processor()
    try:
        source, target = memory(layout), memory(layout)
        source.tensor.copy_(torch.randn(2, 1, 32, 64))
        packed = memory(serialized_layout_desc(layout, serde))
        assert finished(serde.query_serialize_result, serde.submit_serialize([source], [packed], [KEY]))
        packed.tensor[40] ^= 1
        assert not finished(serde.query_deserialize_result, serde.submit_deserialize([packed], [target], [KEY]))
    finally:
        serde.close()


def test_four_bits_are_a_fraction_of_bfloat16():
    layout = MemoryLayoutDesc([torch.Size([2, 30, 256, 192])], [torch.bfloat16])
    serde = processor()
    assert serde.estimate_serialized_size(layout) * 3.7 < 2 * 30 * 256 * 192 * 2
    serde.close()


def test_groups_of_layers_with_other_shapes():
    layout = MemoryLayoutDesc([torch.Size([2, 2, 40, 64]), torch.Size([2, 1, 40, 128])], [torch.bfloat16] * 2)
    serde = processor("turboquant:bits=4;-1=exact:dtype=bf16")
    try:
        source, target = memory(layout), memory(layout)
        for i in range(2):
            source.get_tensor(i).copy_(torch.randn(layout.shapes[i]))
        packed = memory(serialized_layout_desc(layout, serde))
        assert finished(serde.query_serialize_result, serde.submit_serialize([source], [packed], [KEY]))
        assert finished(serde.query_deserialize_result, serde.submit_deserialize([packed], [target], [KEY]))
        assert torch.equal(target.get_tensor(1), source.get_tensor(1))
    finally:
        serde.close()


@contextlib.contextmanager
def adapter_on(folder, **serde):
    """Return the adapter that the JSON in docs/serving.md configures, over memory of LMCache's
    first level."""
    shape = {} if "storage" in serde else {"head_dim": 64}
    spec = {"type": "fs", "base_path": str(folder), "serde": {"type": "tersekv", **shape, **serde}}
    parser = add_l2_adapters_args(argparse.ArgumentParser())
    config = parse_args_to_l2_adapters_config(parser.parse_args(["--l2-adapter", json.dumps(spec)])).adapters[0]
    level1 = L1Manager(L1ManagerConfig(L1MemoryManagerConfig(2**24, use_lazy=False, init_size_in_bytes=2**24)))
    adapter = SerdeL2AdapterWrapper(create_l2_adapter(config), create_serde_processor(config.serde_config), level1)
    yield adapter
    adapter.close()
    level1.close()


@pytest.fixture
def on_disk(tmp_path):
    with adapter_on(tmp_path, recipe="turboquant:bits=4") as adapter:
        yield adapter


def test_chunks_on_disk_through_an_adapter(on_disk, tmp_path):
    layout = MemoryLayoutDesc([torch.Size([2, 3, 256, 192])], [torch.bfloat16])
    source, target = memory(layout), memory(layout)
    source.tensor.copy_(torch.randn(2, 3, 256, 192))
    on_disk.submit_store_task([KEY], [source])
    finished(on_disk.pop_completed_store_tasks)
    (file,) = tmp_path.rglob("*.data")
    coder = plugin.ChunkCoder(plugin.Recipe.parse("turboquant:bits=4"), 64)
    assert file.read_bytes() == coder.pack([source.tensor]).numpy().tobytes()

    found = finished(on_disk.query_load_result, on_disk.submit_load_task([KEY], [target]))
    want = torch.empty_like(source.tensor)
    coder.unpack(coder.pack([source.tensor]), [want])
    assert found.test(0)
    assert torch.equal(target.tensor, want)

    damaged = bytearray(file.read_bytes())
    damaged[100] ^= 1
    file.write_bytes(damaged)
    assert not finished(on_disk.query_load_result, on_disk.submit_load_task([KEY], [target])).test(0)


CALIBRATED = ["trellis:bits=3,centre=false/trellis:bits=2", "kvquant:bits=4,pre_rope=false,outliers=0.02,room=1.5"]


@pytest.fixture(params=CALIBRATED)
def calibrated(request, tmp_path):
    """Return a function that calibrates three layers of two heads and gives the serde's options."""
    from random_calibration import calibration

    def options(seed: int = 0) -> dict:
        file = tmp_path / f"{seed}.safetensors"
        calibration(request.param, 3, 2, 64, seed).save(file)
        return {"recipe": request.param, "calibration": str(file)}

    return options


def written() -> TensorMemoryObj:
    """Return the chunk that the other process writes."""
    source = memory(MemoryLayoutDesc([torch.Size([2, 3, 256, 128])], [torch.bfloat16]))
    source.tensor.copy_(torch.randn(2, 3, 256, 128, generator=torch.Generator().manual_seed(3)))
    return source


def store(folder: str, serde: dict) -> None:
    """Write a chunk; runs in a process of its own."""
    plugin.register()
    with adapter_on(folder, **serde) as adapter:
        adapter.submit_store_task([KEY], [written()])
        finished(adapter.pop_completed_store_tasks)


def stored_elsewhere(folder, serde):
    """Store a chunk in another process. Return its file, the chunk, and memory of the same form."""
    folder.mkdir()
    process = multiprocessing.get_context("spawn").Process(target=store, args=(str(folder), serde))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    (file,) = folder.rglob("*.data")
    source, target = written(), memory(MemoryLayoutDesc([torch.Size([2, 3, 256, 128])], [torch.bfloat16]))
    return file, source, target


def test_another_process_reads_what_one_has_written(calibrated, tmp_path):
    folder, serde = tmp_path / "shared", calibrated()
    file, source, target = stored_elsewhere(folder, serde)
    with adapter_on(folder, **serde) as adapter:
        assert finished(adapter.query_load_result, adapter.submit_load_task([KEY], [target])).test(0)
        want = torch.empty_like(source.tensor)
        made = plugin.Calibration.load(serde["calibration"])
        coder = plugin.ChunkCoder(plugin.Recipe.parse(serde["recipe"]), 64, made)
        coder.unpack(coder.pack([source.tensor]), [want])
        assert torch.equal(target.tensor, want)
        whole = file.read_bytes()
        for damaged in (whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1])):
            file.write_bytes(damaged)
            assert not finished(adapter.query_load_result, adapter.submit_load_task([KEY], [target])).test(0)
        file.write_bytes(whole)
        assert finished(adapter.query_load_result, adapter.submit_load_task([KEY], [target])).test(0)
    with adapter_on(folder, **calibrated(seed=1)) as adapter:  # another calibration of the same recipe
        assert not finished(adapter.query_load_result, adapter.submit_load_task([KEY], [target])).test(0)


def test_storage_chunks_are_read_by_another_process(tmp_path):
    from random_calibration import stored_model

    pytest.importorskip("pcodec")
    options, _ = stored_model(tmp_path)
    folder, serde = tmp_path / "shared", {"storage": 4, **options}
    file, source, target = stored_elsewhere(folder, serde)
    assert 3.9 < source.tensor.nbytes / file.stat().st_size < 4
    with adapter_on(folder, **serde) as adapter:
        assert finished(adapter.query_load_result, adapter.submit_load_task([KEY], [target])).test(0)
        error = (target.tensor.float() - source.tensor.float()).norm() / source.tensor.float().norm()
        assert error < 0.25
        whole = file.read_bytes()
        for damaged in (whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
            file.write_bytes(damaged)
            assert not finished(adapter.query_load_result, adapter.submit_load_task([KEY], [target])).test(0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"storage": 2, "model": "smollm2"}, "lacks calibration"),
        ({"storage": 2, "recipe": "kivi:bits=4"}, "no option recipe"),
        ({"recipe": "qjl", "head_dim": 64}, "is fitted on the prompt"),
        ({"recipe": "trellis:bits=3", "head_dim": 64}, "does not contain their positions; use centre=false"),
        ({"recipe": "trellis:centre=false", "head_dim": 64}, "give the file of `tersekv calibrate`"),
        ({"recipe": "trellis:centre=false", "head_dim": 64, "calibration": "/no/file"}, "there is no calibration at"),
        ({"recipe": "kivi:bits=4"}, "lacks head_dim"),
        ({"recipe": "kivi:bits=4", "head_dim": 64, "bits": 2}, "no option bits"),
        ({"recipe": "streaming+kivi", "head_dim": 64}, "token policy"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(UserError, match=words):
        create_serde_processor(SerdeConfig("tersekv", options))
