"""Threads of torch around packing, and of kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tersekv.cache import packing
from tersekv.cache.layer import LayerStore
from tersekv.kernels import cpu
from tersekv.recipe import Recipe
from tersekv.threads import FEW_ELEMENTS, one_thread, threads


@pytest.fixture
def two() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two")
def test_few_elements_get_one_thread_and_kernels_keep_theirs() -> None:
    with one_thread(FEW_ELEMENTS):
        assert (torch.get_num_threads(), threads()) == (1, 2)
        with one_thread(1):
            assert (torch.get_num_threads(), threads()) == (1, 2)
        assert (torch.get_num_threads(), threads()) == (1, 2)
    with one_thread(FEW_ELEMENTS + 1):
        assert torch.get_num_threads() == 2
    seen: list[int] = []
    other = threading.Thread(target=lambda: (started.set(), go.wait(), new.start(), new.join()))
    new = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    started, go = threading.Event(), threading.Event()
    other.start()
    started.wait()
    with one_thread(1):  # threads that start meanwhile, as in a server, are not held to one
        go.set()
        other.join()
    assert seen == [2]
    with pytest.raises(ZeroDivisionError), one_thread(1):
        raise ZeroDivisionError
    assert (torch.get_num_threads(), threads()) == (2, 2)


@pytest.mark.usefixtures("two")
def test_mkl_keeps_its_own_number() -> None:
    native = cpu.loaded()
    before = native.mkl_threads()
    native.set_torch_threads(2, 3)
    wanted = native.mkl_threads()  # 0 without MKL
    with one_thread(1):
        assert native.mkl_threads() == min(1, wanted)
    assert native.mkl_threads() == wanted
    native.set_torch_threads(2, before)


@pytest.mark.usefixtures("two")
def test_another_thread_of_the_program_has_its_own_kernel_threads() -> None:
    seen: list[int] = []
    with one_thread(1):
        other = threading.Thread(target=lambda: seen.append(threads()))
        other.start()
        other.join()
    assert seen in ([1], [2])  # torch's number is that of the process or of the thread, by its build
    assert threads() == 2


@pytest.mark.usefixtures("two")
def test_packing_runs_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    encoded = packing.encoded_side

    def watched(*call: Any) -> Any:
        seen.append((torch.get_num_threads(), threads()))
        return encoded(*call)

    monkeypatch.setattr(packing, "encoded_side", watched)
    keys = torch.randn(1, 2, 400, 64)
    store = LayerStore(Recipe.parse("kivi:bits=4").plan(0, 1), keys[:, :, :0], keys[:, :, :0])
    store.append(keys, keys)
    assert seen == [(1, 2)] * 2
    assert store.packed_tokens
    assert torch.get_num_threads() == 2
