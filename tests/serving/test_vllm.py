"""The plug-in inside vLLM: real engines on SmolLM2 and on small random models, each in its own
process."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (make test-serving)")

from tersekv.models.loading import damage, folder_of

RECIPE = "turboquant:bits=4"
REQUEST = "Explain this text in your own words."
ENGINE = Path(__file__).with_name("engine.py")
TEXT = Path(__file__).read_text()
PROMPTS = [
    TEXT[:1800],
    "The capital of France is",
    TEXT[:900] + "\nWhat is this file about?",
    "Once upon a time, in a small village by the sea, there was",
]

ENVIRONMENT = {
    **os.environ,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def run(
    batches, recipe=RECIPE, new_tokens=24, environment=None, before=None, exact="page", calibration=None,
    cancelled=None, **engine,
):  # fmt: skip
    """Return answers, cached tokens, capacity and output of one engine.

    before: recipe (or "") of an engine created before it in the same process. exact: with "page",
    answers depend neither on chunks nor on cached prefixes.
    """
    section = {"recipe": recipe, "exact": exact} | ({"calibration": calibration} if calibration else {})
    extra = {"tersekv": section} if recipe else {}
    options = {"enforce_eager": True, "max_model_len": 1024, "additional_config": extra, "max_num_seqs": 8} | engine
    first = options | {"additional_config": {"tersekv": {"recipe": before}} if before else {}}
    job = {
        "before": None if before is None else first,
        "engine": options,
        "batches": batches,
        "cancelled": cancelled,
        "sampling": {"max_tokens": new_tokens},
    }
    done = subprocess.run(
        [sys.executable, str(ENGINE)], input=json.dumps(job), capture_output=True, text=True, timeout=900,
        env=ENVIRONMENT | (environment or {}),
    )  # fmt: skip
    said = done.stdout + done.stderr
    result = re.findall(r"^RESULT (.*)$", said, re.MULTILINE)
    return (json.loads(result[-1]) if result else None), said


@pytest.fixture(scope="module")
def smollm2() -> str:
    folder = folder_of("smollm2")
    if not folder.is_dir() or damage("smollm2"):
        pytest.skip("SmolLM2 is not on this machine: run `tersekv models pull smollm2`")
    return str(folder)


@pytest.fixture(scope="module")
def packed(smollm2):
    """Prompts of several lengths together, then the same again, then each alone."""
    result, said = run([PROMPTS, PROMPTS], model=smollm2, dtype="float32")
    assert result, said[-3000:]
    return result | {"said": said}


def test_repeated_prompts_use_cached_pages(packed):
    assert packed["cached"][0][0] == 0
    assert packed["cached"][0][2] > 0  # pages of the first prompt, which has the same prefix
    assert packed["cached"][1][0] >= 128
    assert packed["cached"][1][0] % 128 == 0
    assert packed["answers"][1] == packed["answers"][0]


def test_without_prefix_caching_in_small_chunks_the_answers_are_equal(smollm2, packed):
    """Prompts alone and in chunks of 64 tokens: neither batch nor chunk size may change answers."""
    result, said = run(
        [[p] for p in PROMPTS], model=smollm2, dtype="float32", enable_prefix_caching=False, max_num_batched_tokens=64
    )
    assert result, said[-3000:]
    assert [batch[0] for batch in result["answers"]] == packed["answers"][0]
    assert not any(map(sum, result["cached"]))


def test_capacity_printed_by_vllm_and_separate_layers(smollm2, packed):
    native, said = run([PROMPTS[1:2]], recipe=None, model=smollm2, dtype="bfloat16", new_tokens=4)
    assert native, said[-3000:]
    four, said = run([PROMPTS], model=smollm2, dtype="bfloat16", new_tokens=4)
    assert f"KV cache size: {four['capacity']:,} tokens" in said
    assert four["capacity"] >= 3.3 * native["capacity"]
    mixed, said = run(
        [PROMPTS], recipe="turboquant:bits=4/uniform:bits=4;0=exact;-1=exact;1=polarquant", model=smollm2,
        dtype="bfloat16", new_tokens=4,
    )  # fmt: skip
    assert mixed, said[-3000:]
    assert native["capacity"] * 2.5 < mixed["capacity"] < four["capacity"]


def test_without_a_recipe_vllm_is_unchanged(smollm2):
    with_plugin, said = run([PROMPTS], recipe=None, model=smollm2, dtype="bfloat16")
    assert with_plugin, said[-3000:]
    without, _ = run([PROMPTS], recipe=None, model=smollm2, dtype="bfloat16", environment={"VLLM_PLUGINS": ""})
    assert with_plugin["answers"] == without["answers"]
    assert with_plugin["capacity"] == without["capacity"]


def test_greedy_answers_of_four_bits_agree_with_native_bfloat16(smollm2):
    """Questions about passages of 512 tokens: on average the answers agree for more than a few
    tokens.

    Two native engines (vLLM's and transformers') agree for 29 of 64; benchmarks/serving.py measures
    both.
    """
    from tersekv.calibration.text import pydoc_document, question_prompt
    from tersekv.models.loading import load_tokenizer

    tokenizer = load_tokenizer("smollm2")
    texts = [question_prompt(tokenizer, pydoc_document(tokenizer, 512, seed=i), REQUEST) for i in range(8)]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    answers = []
    for recipe in (None, RECIPE):
        result, said = run([ids], recipe=recipe, new_tokens=64, model=smollm2, dtype="bfloat16", exact="step")
        assert result, said[-3000:]
        answers.append(result["answers"][0])
    pairs = zip(*answers, strict=True)
    same = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), 64) for a, b in pairs]
    print(f"the same tokens before the first other: {same}")
    assert sum(same) / len(same) > 8


def small_model(folder: Path, kind: str, **options) -> str:
    """Save a random model with four heads of 64 channels, two of them KV heads."""
    import torch
    import transformers as tf

    torch.manual_seed(0)
    shape = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    shape |= {"initializer_range": 0.1, "eos_token_id": None}
    text = "Text" if kind == "Gemma3" else ""
    config = getattr(tf, f"{kind}{text}Config")(**(shape | options))
    model = getattr(tf, f"{kind}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data += 3.0  # so that they take a good part of the attention
    model.save_pretrained(folder)
    return str(folder)


IDS = [[(7 * i + 3 * j * j) % 512 for i in range(n)] for j, n in enumerate((300, 120, 250, 40, 129))]
SMALL = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 512}
EDGES = "turboquant:bits=4;0=exact;-1=exact"


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    return small_model(tmp_path_factory.mktemp("llama"), "Llama")


CALIBRATED = {
    "trellis:bits=4": "trellis",
    "qjl:calibration=corpus": "qjl:calibration=corpus",
    "turboquant:bits=2.5,calibration=corpus": "turboquant:bits=2.5,calibration=corpus",
    "kvquant:bits=4,room=1.5": "kvquant:bits=4",
}
"""Recipes that need a calibration, and the recipe that it is made for."""


@pytest.fixture(scope="module")
def calibrations(llama, tmp_path_factory) -> dict[str, str]:
    """Calibrate on random ids. Return the file of each recipe."""
    import torch
    import transformers as tf

    from tersekv.calibration.calibrate import Calibrator, Corpus
    from tersekv.recipe import Recipe

    folder = tmp_path_factory.mktemp("calibration")
    ids = torch.randint(512, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    corpus = Corpus.draw("ids", "ids", ids, samples=4, length=256, seed=0)
    model = tf.AutoModelForCausalLM.from_pretrained(llama)
    recipes = [Recipe.parse(text) for text in CALIBRATED.values()]
    files = {}
    for i, (recipe, made) in enumerate(
        zip(CALIBRATED, Calibrator(model, recipes, corpus, work=folder).run(), strict=True)
    ):
        files[recipe] = str(folder / f"{i}.safetensors")
        made.save(Path(files[recipe]))
    return files


@pytest.fixture(scope="module")
def calibration(calibrations) -> str:
    return calibrations["trellis:bits=4"]


@pytest.fixture(scope="module", params=[RECIPE, "trellis:bits=4"])
def roomy(request, llama, calibration):
    """Answers of an engine with enough memory, and its recipe and calibration as arguments of `run`."""
    own = {"recipe": request.param, "calibration": calibration if "trellis" in request.param else None}
    result, said = run([IDS], model=llama, **own, **SMALL)
    assert result, said[-3000:]
    assert result["preempted"] == 0
    return result | {"own": own}


def test_prompts_in_chunks_alone_and_with_speculation_give_the_same_tokens(llama, roomy):
    options = {"max_num_batched_tokens": 64, "enable_prefix_caching": False} | roomy["own"]
    chunks, said = run([[row] for row in IDS], model=llama, **options, **SMALL)
    assert chunks, said[-3000:]
    assert [batch[0] for batch in chunks["answers"]] == roomy["answers"][0]
    guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    ahead, said = run([IDS], model=llama, speculative_config=guess, **roomy["own"], **SMALL)
    assert ahead, said[-3000:]
    assert ahead["answers"] == roomy["answers"]


REQUESTS = int(os.environ.get("TERSEKV_TEST_REQUESTS", "40"))


def test_no_token_is_lost_over_many_requests(llama, calibration):
    """Shared prefixes, preemption, chunks, cancelled requests and speculation, beside a roomy engine without them."""
    draw = random.Random(0)
    shared = [[draw.randrange(512) for _ in range(300)] for _ in range(5)]
    prompts = []
    for _ in range(REQUESTS):
        prefix = draw.choice(shared)[: draw.choice((0, 40, 128, 260))]
        prompts.append(prefix + [draw.randrange(512) for _ in range(draw.randint(1, 120))])
    cancelled = draw.sample(range(REQUESTS), REQUESTS // 10)
    own = {"recipe": "trellis:bits=4", "calibration": calibration, "new_tokens": 40, "model": llama}
    guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    options = {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 64, "speculative_config": guess}
    tight, said = run([prompts], cancelled=cancelled, **options, **own, **SMALL)
    assert tight, said[-3000:]
    assert tight["preempted"] > 0
    assert max(tight["cached"][0]) >= 128
    kept = [prompt for i, prompt in enumerate(prompts) if i not in cancelled]
    alone, said = run([kept], enable_prefix_caching=False, **own, **SMALL)
    assert alone, said[-3000:]
    assert tight["answers"] == alone["answers"]


@pytest.mark.parametrize("recipe", [recipe for recipe in CALIBRATED if "trellis" not in recipe])
def test_calibrated_codecs_do_not_depend_on_chunks_and_cached_prefixes(llama, calibrations, recipe):
    own = {"recipe": recipe, "calibration": calibrations[recipe], "model": llama}
    prompts = [*IDS, IDS[0][:256] + IDS[3]]
    whole, said = run([prompts, prompts], **own, **SMALL)
    assert whole, said[-3000:]
    assert whole["cached"][1][0] >= 128
    assert whole["answers"][1] == whole["answers"][0]
    options = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    chunks, said = run([[row] for row in prompts], **options, **own, **SMALL)
    assert chunks, said[-3000:]
    assert [batch[0] for batch in chunks["answers"]] == whole["answers"][0]
    native, said = run([prompts], recipe=None, model=llama, **SMALL)
    assert native, said[-3000:]
    assert native["answers"] != whole["answers"][:1]  # pages were read packed


@pytest.mark.parametrize("before", ["", "uniform:bits=8;0=exact"])
def test_a_second_engine_of_a_process_has_its_own_recipe(llama, roomy, before):
    second, said = run([IDS], model=llama, before=before, **roomy["own"], **SMALL)
    assert second, said[-3000:]
    assert (second["answers"], second["capacity"]) == (roomy["answers"], roomy["capacity"])


def test_a_second_engine_with_an_unsupported_recipe_is_an_error(llama, tmp_path):
    """An error, as for an unsupported vLLM version. The first engine runs without a recipe."""
    (tmp_path / "sitecustomize.py").write_text("import tersekv.serving.vllm as p\np.SUPPORTED = ('0.1',)\n")
    result, said = run([IDS[:1]], model=llama, before="", environment={"PYTHONPATH": str(tmp_path)}, **SMALL)
    assert result is None
    assert "the plug-in is written for 0.1" in said, said[-3000:]


def test_tensor_parallel_gives_the_same_tokens(llama, roomy):
    cores = "0|1" if (os.cpu_count() or 1) > 1 else "nobind"
    environment = {"VLLM_CPU_OMP_THREADS_BIND": cores}
    two, said = run([IDS], model=llama, tensor_parallel_size=2, environment=environment, **roomy["own"], **SMALL)
    assert two, said[-3000:]
    assert two["answers"] == roomy["answers"]


def test_preempted_requests_give_the_same_tokens(llama, roomy):
    """There are six pages besides one of vLLM's own. The first three prompts fit, and two grow into
    another page."""
    tight, said = run([IDS], model=llama, num_gpu_blocks_override=7, **roomy["own"], **SMALL)
    assert tight, said[-3000:]
    assert tight["preempted"] > 0
    assert tight["answers"] == roomy["answers"]


def test_native_first_and_last_layers_with_shared_prefixes(llama):
    """Prompts with a common prefix in two rounds, with native and packed layers in one engine."""
    prompts = [IDS[0], IDS[0][:200] + IDS[1], IDS[0][:256]]
    shared, said = run([prompts[:1], prompts], recipe=EDGES, model=llama, **SMALL)
    assert shared, said[-3000:]
    assert shared["cached"][1] == [256, 128, 128]
    alone, said = run([[p] for p in prompts], recipe=EDGES, model=llama, enable_prefix_caching=False, **SMALL)
    assert alone, said[-3000:]
    assert shared["answers"][1] == [batch[0] for batch in alone["answers"]]


@pytest.mark.parametrize(
    ("kind", "options", "engine", "recipe", "words"),
    [
        ("Llama", {"head_dim": 32}, {}, "polarquant:bits=4-2-2-2-2-2", "does not divide the head dim 32"),
        ("Llama", {}, {"kv_cache_dtype": "fp8"}, RECIPE, "kv_cache_dtype is 'fp8'"),
        ("Llama", {}, {"block_size": 48}, RECIPE, "pages hold 48 tokens"),
        ("Llama", {}, {}, "h2o:budget=64+kivi:bits=4", "has the token policy"),
        ("Llama", {}, {}, "qjl", "cannot be used in an engine's pages"),
        ("Llama", {}, {}, "trellis:bits=4", "needs a calibration"),
        ("Llama", {}, {}, "turbo", "unknown method 'turbo'"),
    ],
    ids=["head dim", "fp8", "block size", "policy", "state", "calibration", "name"],
)
def test_unsupported_models_are_refused(tmp_path, kind, options, engine, recipe, words):
    model = small_model(tmp_path, kind, **options)
    result, said = run([IDS[1:2]], recipe, new_tokens=2, model=model, **SMALL, **engine)
    assert result is None
    assert words in said, said[-3000:]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def test_vllm_serve_answers_an_openai_request(smollm2, tmp_path):
    port, log = free_port(), (tmp_path / "log").open("w+")
    config = json.dumps({"tersekv": {"recipe": RECIPE}})
    # `vllm serve` without its program, which requires a package named vllm; vllm-cpu has another
    # name
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", smollm2]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "smollm2", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "1024"]
    command += ["--additional-config", config]
    server = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT)
    body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        until = time.monotonic() + 600
        while True:
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    said = json.load(answer)
                break
            except (urllib.error.URLError, ConnectionError):
                assert server.poll() is None, Path(log.name).read_text()[-3000:]
                assert time.monotonic() < until
                time.sleep(1)
        assert "Paris" in said["choices"][0]["text"]
        assert re.search(r"KV cache size: 1[67]\d,\d{3} tokens", Path(log.name).read_text())
    finally:
        server.terminate()
        server.wait(timeout=60)
        log.close()
