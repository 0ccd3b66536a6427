"""Fixtures: tiny random-weight models of the architectures for which transformers behaves
differently."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests never download
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

import transformers as tf

from covering import covering
from native_calls import ROUNDING_ISAS
from tersekv.calibration import calibrate, find, first_use
from tersekv.cli import output
from tersekv.codecs import methods, registered
from tersekv.kernels import cpu, triton
from tersekv.models import loading
from tersekv.recipe import LayerPlan, Recipe

CASES = 2
"""Cases of a test function in the fast tier, spread evenly over all of them."""

WHOLE = {
    "backends", "bench_generate", "bench_gpu", "benchmark_compiled", "benchmark_papers_kvquant",
    "benchmark_prefill", "calibrate", "calibrate_cli", "claims_subgen", "cli", "cli_output", "compiled",
    "context_parallel", "contributing", "decode_waits", "docs_code", "estimate_cli", "evals_harness",
    "examples", "extras", "gguf_faults", "interrupted", "packaging", "plot_program", "prompt_cache_cli",
    "report", "saved_forged", "tensor_parallel",
}  # fmt: skip
"""Files of tests that are not in the fast tier: they start programs, compile models, or draw many samples."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose tests."""
    parser.addoption("--tier", choices=["fast", "rest"], help="fast: what `make test` runs; rest: all other tests")
    parser.addoption("--every", action="store_true", help="all combinations of parameters, not a covering design")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of the other tier, and combinations that the covering design does not need.

    Kernels are compiled for pairs of parameters, such as a layout and an instruction set. Their tests
    cover every pair, other tests every value.
    """
    tier, every = config.getoption("--tier"), config.getoption("--every")
    by_function: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:  # cases on a GPU may be skipped, and then cover nothing
        by_function.setdefault((item.nodeid.split("[")[0], "gpu" in item.keywords), []).append(item)
    kept, fast = set(), set()
    for cases in by_function.values():
        if not every:
            pairs = cases[0].path.parent.name == "kernels" and not cases[0].path.stem.startswith("test_ops_triton")
            cases = [cases[i] for i in covering(axes(cases), 2 if pairs else 1)]
        kept |= set(cases)
        name = cases[0].path.stem.removeprefix("test_")
        if name not in WHOLE and not name.startswith("ops_triton"):
            last = len(cases) - 1
            fast |= {cases[last * i // (CASES - 1)] for i in range(CASES)}
    chosen = kept if tier is None else fast if tier == "fast" else kept - fast
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def axes(cases: list[pytest.Item]) -> list[tuple[str, ...]]:
    """Return the values of each case, those of one `parametrize` together."""
    together = [mark.args[0] for mark in cases[0].iter_markers("parametrize")]
    sets = [{name.strip() for name in (names.split(",") if isinstance(names, str) else names)} for names in together]
    found = []
    for case in cases:
        params = case.callspec.params if isinstance(case, pytest.Function) and hasattr(case, "callspec") else {}
        alone = [{name} for name in params if not any(name in names for names in sets)]
        found.append(tuple(str([id(params.get(name)) for name in sorted(names)]) for names in [*sets, *alone]))
    return found


SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
HEAD = {"head_dim": 32}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MLA = {
    "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "n_shared_experts": 1,
}  # fmt: skip

MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE, **HEAD)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**SHAPE, **HEAD, sliding_window=48)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SHAPE)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SHAPE, **HEAD)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**SHAPE, **HEAD, sliding_window=48)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**SHAPE, **HEAD, sliding_window=48, layer_types=MIXED)
    ),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**SHAPE)),
    "gpt_oss": lambda: tf.GptOssForCausalLM(
        tf.GptOssConfig(
            **SHAPE, **HEAD, num_local_experts=2, num_experts_per_tok=2, sliding_window=48, layer_types=MIXED
        )
    ),
    "deepseek_v3": lambda: tf.DeepseekV3ForCausalLM(
        tf.DeepseekV3Config(**(SHAPE | {"num_key_value_heads": 4}), **MLA)
    ),
}  # fmt: skip

LOSSLESS = "window:sinks=4,recent=32,exact=fp32+exact:dtype=fp32"


def build(name: str) -> tf.PreTrainedModel:
    """Build a model in evaluation mode with fixed random weights, large enough for unambiguous
    greedy choices."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


@pytest.fixture(scope="session", autouse=True)
def short_calibrations(tmp_path_factory) -> Iterator[None]:
    """Presets calibrate models of this process on short texts, in a temporary folder unless a test
    sets TERSEKV_CACHE."""
    folder = tmp_path_factory.mktemp("cache")

    def cache_dir() -> Path:
        return loading.cache_dir() if "TERSEKV_CACHE" in os.environ else folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "cache_dir", cache_dir)
        patch.setattr(find, "cache_dir", cache_dir)
        patch.setattr(first_use, "SAMPLES", 2)
        patch.setattr(first_use, "LENGTH", 48)
        yield


@pytest.fixture(scope="session", autouse=True)
def language_prepared_once() -> Iterator[None]:
    """Triton's interpreter prepares its language once per launch, and not again in each call of a device function.

    It looks through all names of the language for that, which takes longer than most device functions.
    """
    with pytest.MonkeyPatch.context() as patch:
        if triton.why_not_installed() is None:
            from triton import language
            from triton.runtime import interpreter

            prepare, names = interpreter._patch_lang, {"tl": language, "core": language.core}
            patch.setattr(interpreter, "_patch_lang", lambda _: prepare(SimpleNamespace(__globals__=names)))
            run = interpreter.InterpretedFunction.rewrite
            patch.setattr(interpreter.InterpretedFunction, "__call__", lambda f, *args, **more: run(f)(*args, **more))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_progress_lines() -> Iterator[None]:
    """Commands of this process print no progress lines, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "EVERY", 24 * 3600.0)
        yield


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a test its own folder of models and calibrations."""
    monkeypatch.setenv("TERSEKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def unregister() -> Iterator[None]:
    """Remove registered codecs after a test, since other tests count the methods."""
    yield
    registered.clear()
    methods.cache_clear()


def complaints(stderr: str) -> list[str]:
    """Return the lines of a process' stderr except progress, which only slow machines print."""
    return [line for line in stderr.splitlines() if " so far" not in line]


@pytest.fixture(scope="session")
def models():
    """Build each architecture once per session."""
    return {name: build(name) for name in MODELS}


@pytest.fixture
def llama(models):
    return models["llama"]


def score_heads() -> Callable[[], None]:
    """Give every plan the importance of 2 heads per layer, if its policy needs that.

    Return a function that ends it.
    """
    plan = Recipe.plan

    def scored(recipe: Recipe, layer: int, layers: int) -> LayerPlan:
        made = plan(recipe, layer, layers)
        scores = 0.5 + torch.rand(layers, 2, generator=torch.Generator().manual_seed(layers))
        return made._replace(scores=scores) if made.policy.needs_scores else made

    asked = find.needs_profile
    Recipe.plan, find.needs_profile = scored, lambda recipe, config: False  # type: ignore[method-assign]

    def restore() -> None:
        Recipe.plan, find.needs_profile = plan, asked  # type: ignore[method-assign]

    return restore


@pytest.fixture
def scored_heads() -> Iterator[None]:
    """Run a test with `score_heads`."""
    restore = score_heads()
    yield
    restore()


def prompt(tokens: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Return random token ids [batch, tokens] without special tokens."""
    return torch.randint(3, 97, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def benchmark(name: str) -> ModuleType:
    """Load a program of the folder benchmarks/ as a module."""
    path = Path(__file__).resolve().parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name.replace('/', '_')}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    folder = str(Path(__file__).resolve().parents[1] / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)  # as when run as a program: programs import each other
    spec.loader.exec_module(module)
    return module


def data_folder() -> Path | None:
    """Return the folder of test texts next to the checkout, or None."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None


CHAT_TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|answer|>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a Llama of two layers with random weights and one token per byte. Return its folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    specials = ["<|end|>", "<|user|>", "<|answer|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*specials, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", additional_special_tokens=specials[1:]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=0,
    )
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def smollm2():
    """Load the default model and its tokenizer if it has been pulled. Tests never download."""
    from tersekv.models import loading

    if not (loading.cache_dir() / "models" / "smollm2" / "config.json").is_file():
        pytest.skip("the default model is not on this machine: run `tersekv models pull smollm2`")
    return loading.load("smollm2")


@pytest.fixture(scope="session")
def real_keys(smollm2) -> torch.Tensor:
    """Return keys after RoPE of 512 tokens of the language reference, float32 [layers, Hkv, T, D]."""
    from tersekv.calibration.capture import capture
    from tersekv.calibration.text import pydoc_document

    model, tokenizer = smollm2
    ids = tokenizer(pydoc_document(tokenizer, 600), return_tensors="pt")["input_ids"][:, :512]
    return torch.stack([layer.keys[0] for layer in capture(model, ids)]).float()


@pytest.fixture(autouse=True)
def float32_kernels():
    """Use kernels that multiply in float32, because tests of the whole path rely on their error
    bounds.

    tests/kernels/test_ops_parity.py chooses every instruction set itself.
    """
    rounds = cpu.why_not_built() is None and cpu.isa() in ROUNDING_ISAS
    if rounds:
        cpu.set_isa("avx512")
    yield
    if rounds:
        cpu.set_isa("auto")
