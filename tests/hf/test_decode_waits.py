"""During decoding our code never waits for the device: no number or tensor is read back to the
host.

The tests run on the CPU, where Triton's kernels are interpreted. Tensors claim not to be on a CPU,
so that the code takes the same path as on a GPU. Calls of transformers' own code are not counted.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tersekv
from conftest import HEAD, SHAPE, prompt
from tersekv.kernels import backends, triton

pytestmark = [
    pytest.mark.skipif(triton.why_not_installed() is not None, reason=str(triton.why_not_installed())),
    pytest.mark.skipif(not triton.interpreted(), reason="kernels run on the GPU here"),
]
OURS = str(Path(tersekv.__file__).parent)
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "equal")
"""Methods that copy a tensor's values to the host. Some read a CPU tensor without any operation."""
SIZED_BY_VALUES = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")
"""Operations whose result shape depends on values and which others use, for example selection by
bools."""


def caller() -> str | None:
    """Return the place in our code that made the current call, or None for a call from elsewhere."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(OURS):
            return f"{Path(path).relative_to(OURS)}:{frame.f_lineno} {frame.f_code.co_name}"
        if "/transformers/" in path:
            return None
        frame = frame.f_back
    return None


class Reads(TorchFunctionMode):
    """Records methods that read a tensor that is not in `host`."""

    def __init__(self, noted: list[str], host: list[int]) -> None:
        super().__init__()
        self.noted, self.host = noted, host

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        to_cpu = name == "to" and any(str(a) == "cpu" for a in (*args[1:], *(kwargs or {}).values()))
        if name in READS or to_cpu:
            x = args[0]
            if x.untyped_storage().data_ptr() not in self.host and (where := caller()):
                self.noted.append(f"{name} in {where}")
        return func(*args, **(kwargs or {}))


class Sized(TorchDispatchMode):
    """Records operations that the host waits for."""

    def __init__(self, noted: list[str], host: list[int]) -> None:
        super().__init__()
        self.noted, self.host = noted, host

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        by = args[1] if op.overloadpacket.__name__ in ("index", "index_put", "index_put_") else []
        chosen = any(part is not None and part.dtype is torch.bool for part in by)
        if chosen or op.overloadpacket.__name__ in SIZED_BY_VALUES:
            x = args[0]
            if x.untyped_storage().data_ptr() not in self.host and (where := caller()):
                self.noted.append(f"{op} in {where}")
        return op(*args, **(kwargs or {}))


def waits(run, monkeypatch, host=()) -> list[str]:
    """Return the reads of `run`, except those of tensors on the host."""
    from triton.runtime.interpreter import InterpretedFunction

    noted: list[str] = []
    launch = InterpretedFunction.run

    def outside(kernel, *args, **options):
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            return launch(kernel, *args, **options)

    places = [x.untyped_storage().data_ptr() for x in host if x is not None]
    with monkeypatch.context() as patch, Reads(noted, places), Sized(noted, places):
        patch.setattr(InterpretedFunction, "run", outside)
        patch.setattr(torch.Tensor, "is_cpu", False, raising=False)
        run()
    return noted


WINDOW = "window:sinks=4,recent=32"
RECIPES = [
    "kivi:bits=4", "turboquant:bits=3", "polarquant", "qjl:initial_layers=0", "kvquant:bits=3,calibration=prompt",
    "kvquant:bits=3,calibration=prompt,pre_rope=false", "trellis:bits=2,calibration=prompt",
]  # fmt: skip

READING = {
    "item": lambda x: x.sum().item(), "tolist": lambda x: x.tolist(), "bool": lambda x: bool(x.any()),
    "to": lambda x: x.to("cpu"), "cpu": lambda x: x.cpu(), "choice": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(), "int": lambda x: int(x[0]), "numpy": lambda x: x.numpy(),
}  # fmt: skip


@pytest.mark.parametrize("read", READING.values(), ids=READING)
def test_reads_of_our_code_are_counted(read, monkeypatch):
    """Reads from our folder count and others do not. Otherwise `test_steps` could not fail."""
    ours: dict = {"read": read}
    exec(compile("def run(x):\n    read(x)", f"{OURS}/example.py", "exec"), ours)
    x = torch.ones(3)
    assert waits(lambda: ours["run"](x), monkeypatch)
    assert not waits(lambda: read(x), monkeypatch)


def test_tensors_of_the_host_are_not_counted(monkeypatch):
    ours: dict = {}
    exec(compile("def run(x):\n    return int(x[0])", f"{OURS}/example.py", "exec"), ours)
    x = torch.ones(3)
    assert not waits(lambda: ours["run"](x), monkeypatch, [x])


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps(recipe, monkeypatch):
    """Two layers; a padded batch while no block is packed. The start of its rows is known on the host."""
    recipe = f"{WINDOW}+{recipe}"
    few = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}  # Triton's interpreter is slow
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**(SHAPE | few), **HEAD)).eval()
    ids = prompt(80, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with warnings.catch_warnings(), tersekv.compress(model, recipe), torch.no_grad():
        warnings.simplefilter("ignore")
        cache = tersekv.CompressedCache(model.config, recipe)
        model(ids, attention_mask=mask, past_key_values=cache)
        stores = [layer.store for layer in cache.layers]
        packed = [store.packed_tokens for store in stores]
        assert min(packed) > 0

        def step():
            nonlocal mask
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            model(ids[:, :1], attention_mask=mask, past_key_values=cache)

        with backends.forced("triton"):
            step()  # makes tables
            noted = waits(step, monkeypatch, [store.rotary.padding for store in stores if store.rotary is not None])
    assert [store.packed_tokens for store in stores] == packed
    assert noted == []
