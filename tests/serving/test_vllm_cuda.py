"""The plug-in on vLLM's CUDA platform, without a GPU.

Tested are the backend that vLLM selects there, the page specs of layers, and steps of a layer with
the kernels in Triton's interpreter. The steps are compared with those of the CPU backend.
"""

from __future__ import annotations

import itertools
import os
import sys
from types import ModuleType

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which vLLM does
pytest.importorskip("vllm", reason="vLLM is not installed (make test-serving)")

import torch
import vllm.platforms
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.platforms.interface import DeviceCapability, Platform
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import compute_layer_kv_cache_shape_bytes
from vllm.v1.worker.utils import customize_attention_spec, select_common_block_size

from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.serving import vllm as plugin

RECIPE = "turboquant:bits=4;0=exact"
HEADS, KV_HEADS, HEAD_DIM, PAGES, PAGE_TOKENS = 6, 2, 64, 8, 32


@pytest.fixture(scope="module")
def hopper() -> type[Platform]:
    """Return vLLM's CUDA platform as if it had found one H100."""
    with pytest.MonkeyPatch.context() as patch:
        missing = "vllm._C_stable_libtorch"  # kernels that vLLM's CPU build lacks
        patch.setitem(sys.modules, missing, ModuleType(missing))
        from vllm.platforms.cuda import CudaPlatformBase

    class Hopper(CudaPlatformBase):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "an H100 that is not there")

    return Hopper


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Save a Llama's configuration without weights."""
    import transformers as tf

    folder = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    tf.LlamaConfig(num_hidden_layers=3, vocab_size=512, architectures=["LlamaForCausalLM"], **shape).save_pretrained(
        folder
    )
    return str(folder)


@pytest.fixture
def engine(model, hopper, monkeypatch):
    """Return a function from platform and changed arguments to vLLM's configuration with the
    plug-in."""
    monkeypatch.delenv("TERSEKV_VLLM_RECIPE", raising=False)
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    cpu = vllm.platforms.current_platform

    def made(platform, recipe=RECIPE, backend="TRITON_ATTN", **options):
        monkeypatch.setattr(vllm.platforms, "_current_platform", cpu)  # arguments are checked for an existing device
        extra = {"tersekv": {"recipe": recipe}} if recipe else {}
        usual = {"model": model, "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 512}
        config = EngineArgs(**usual, additional_config=extra, **options).create_engine_config()
        config.attention_config.backend = AttentionBackendEnum[backend] if backend else None
        monkeypatch.setattr(vllm.platforms, "_current_platform", hopper() if platform == "cuda" else cpu)
        selector._cached_get_attn_backend.cache_clear()
        plugin.register()
        return config

    yield made
    selector._cached_get_attn_backend.cache_clear()


def chosen(config, **layer):
    """Return the backend that vLLM selects for a layer."""
    with set_current_vllm_config(config):
        return selector.get_attn_backend(HEAD_DIM, torch.bfloat16, "auto", **layer)


def layers_of(config, load=True, **options):
    """Return three attention layers that have been configured by the recipe."""
    with set_current_vllm_config(config):
        layers = [
            Attention(
                HEADS, HEAD_DIM, 0.125, KV_HEADS, cache_config=config.cache_config, prefix=f"model.layers.{i}.attn",
                **options,
            )
            for i in range(3)
        ]  # fmt: skip
        for layer in layers if load else []:
            layer.process_weights_after_loading(torch.float32)
    return layers


def spec_of(layer, config):
    return customize_attention_spec(layer.attn_backend, layer.get_kv_cache_spec(config))


def test_the_selector_returns_our_backend(engine):
    config = engine("cuda")
    backend = chosen(config)
    assert backend.full_cls_name() == ("tersekv.serving.vllm.cuda", "PackedBackend")
    assert backend.get_name() == "TRITON_ATTN"
    assert chosen(engine("cpu")).full_cls_name() == ("tersekv.serving.vllm.cpu", "PackedBackend")


def test_without_a_recipe_layers_are_unchanged(engine):
    for layer in layers_of(engine("cuda", recipe=None)):
        assert type(layer.impl) is TritonAttentionBackend.get_impl_cls()
        assert layer.attn_backend.get_builder_cls() is TritonAttentionBackend.get_builder_cls()
    assert chosen(engine("cuda", recipe=None, backend="FLEX_ATTENTION")).__module__.startswith("vllm.")


@pytest.mark.parametrize(
    ("platform", "backend", "layer", "words"),
    [
        ("cuda", None, {}, "FLASH_ATTN, and the plug-in replaces TRITON_ATTN only .--attention-backend TRITON_ATTN"),
        ("cuda", "FLEX_ATTENTION", {}, "chosen its backend FLEX_ATTENTION"),
        ("cuda", None, {"use_mla": True}, "latent attention"),
        ("rocm", "TRITON_ATTN", {}, "vLLM runs on rocm"),
    ],
)
def test_other_backends_and_platforms_are_refused(engine, hopper, monkeypatch, platform, backend, layer, words):
    if platform == "rocm":
        monkeypatch.setattr(hopper, "device_name", platform)
    config = engine("cuda", backend=backend)
    with pytest.raises(UserError, match=words):
        chosen(config, **layer)


@pytest.mark.parametrize(
    ("engine_options", "layer_options", "words"),
    [
        ({"kv_cache_dtype": "fp8"}, {}, "kv_cache_dtype is 'fp8'"),
        ({"block_size": 48}, {}, "pages hold 48 tokens"),
        ({}, {"attn_type": "encoder_only"}, "type 'encoder_only'"),
    ],
)
def test_unsupported_layers_are_refused(engine, engine_options, layer_options, words):
    with pytest.raises(UserError, match=words):
        layers_of(engine("cuda", **engine_options), **layer_options)


def test_a_variant_of_the_backend_is_refused(engine):
    """vLLM derives a backend from a layer's where it restricts attention (chunks of Llama 4)."""
    config = engine("cuda")
    layers = layers_of(config, load=False)
    layers[1].attn_backend = type("ChunkedLocalAttention", (layers[1].attn_backend,), {})
    with pytest.raises(UserError, match=r"layers\.1.*ChunkedLocalAttention"):
        layers[1].process_weights_after_loading(torch.float32)


def test_pages_and_plans_are_those_of_the_cpu(engine):
    """The spec that determines vLLM's cache size, and its shape, layout, builder and page sizes."""
    said = {}
    for platform, native in (("cpu", CPUAttentionBackend), ("cuda", TritonAttentionBackend)):
        config = engine(platform, block_size=PAGE_TOKENS)
        first, packed, last = layers_of(config)
        assert type(first.impl) is native.get_impl_cls()
        assert first.attn_backend.get_builder_cls() is native.get_builder_cls()
        assert spec_of(first, config).state_content_bytes is None
        assert packed.attn_backend is last.attn_backend
        spec, backend = spec_of(packed, config), packed.attn_backend
        assert backend.get_name() == native.get_name()
        builder = backend.get_builder_cls()
        assert builder.get_cudagraph_support(config, spec) is AttentionCGSupport.NEVER
        shape = compute_layer_kv_cache_shape_bytes(spec, PAGES)
        said[platform] = (spec, shape, backend.supported_kv_cache_layouts(), builder, type(packed.impl))
    assert said["cuda"] == said["cpu"]
    spec, shape = said["cuda"][:2]
    assert shape == (PAGES, KV_HEADS, PAGE_TOKENS, spec.state_content_bytes)
    assert spec.page_size_bytes * 3.7 < KV_HEADS * PAGE_TOKENS * 2 * HEAD_DIM * 2


def test_without_a_size_pages_are_whole_blocks(engine, hopper):
    """vLLM's own CUDA backend starts from pages of 16 tokens."""
    config = engine("cuda")
    layers = layers_of(config)
    hopper.update_block_size_for_backend(config)
    assert config.cache_config.block_size == 32
    backend, spec = layers[1].attn_backend, spec_of(layers[1], config)
    assert not backend.supports_block_size(16)
    assert select_common_block_size(128, [backend], [spec]) == 128


def batch(starts, seen, tables):
    """Return the metadata of vLLM's runner for a step. Request i has queries starts[i] to starts[i
    + 1]."""
    slots = []
    for (first, last), tokens, table in zip(itertools.pairwise(starts), seen, tables, strict=True):
        position = torch.arange(tokens - (last - first), tokens)
        slots.append(table[position // PAGE_TOKENS].long() * PAGE_TOKENS + position % PAGE_TOKENS)
    counts = [last - first for first, last in itertools.pairwise(starts)]
    where = torch.tensor(starts, dtype=torch.int32)
    return CommonAttentionMetadata(
        where, where, torch.tensor(seen, dtype=torch.int32), len(seen), starts[-1], max(counts), max(seen), tables,
        torch.cat(slots),
    )  # fmt: skip


STEPS = {"prompts": (40, 33), "a chunk and a token": (37, 1), "tokens": (1, 1), "a token and a few": (1, 3)}


def answers(layer, config):
    """Return the outputs of consecutive steps and the resulting pages."""
    spec = spec_of(layer, config)
    builder = layer.attn_backend.get_builder_cls()(spec, [layer.layer_name], config, torch.device("cpu"))
    memory = torch.zeros(compute_layer_kv_cache_shape_bytes(spec, PAGES), dtype=torch.uint8)
    tables = torch.tensor([[5, 2, 7], [1, 4, 0]], dtype=torch.int32)
    torch.manual_seed(0)
    seen, outs = [0, 0], {}
    for name, counts in STEPS.items():
        seen = [before + count for before, count in zip(seen, counts, strict=True)]
        query, key, value = (torch.randn(sum(counts), n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
        plan = builder.build(0, batch([0, *itertools.accumulate(counts)], seen, tables.clone()))
        outs[name] = layer.impl.forward(layer, query, key, value, memory, plan, torch.full_like(query, float("nan")))
    return outs, memory


def test_steps_are_those_of_the_cpu(engine, monkeypatch):
    """Triton's kernels encode and read the pages. The difference is only rounding."""
    from tersekv.kernels.triton import launch

    config = engine("cpu", block_size=PAGE_TOKENS)
    expected, pages = answers(layers_of(config)[1], config)
    calls, run = [], launch.attend_pages
    monkeypatch.setattr(launch, "attend_pages", lambda *call: calls.append(call) or run(*call))
    config = engine("cuda", block_size=PAGE_TOKENS)
    layer = layers_of(config)[1]
    with backends.forced("triton"):
        outs, own = answers(layer, config)
    assert len(calls) >= 3  # one for the one-query requests of each later step
    for name, out in outs.items():
        torch.testing.assert_close(out, expected[name], atol=4e-3, rtol=4e-3, msg=name)
    assert (own == pages).float().mean() > 0.999
