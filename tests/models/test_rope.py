"""Keys coded before RoPE: the inverse matches the model's RoPE for every RoPE type, without
additional error."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

import tersekv
from conftest import HEAD, SHAPE, prompt
from tersekv.cache import coding
from tersekv.cache.rotary import Rotary
from tersekv.calibration.capture import capture
from tersekv.errors import UserError
from tersekv.models import rope as rope_file
from tersekv.models.rope import Ropes
from tersekv.transforms.rope import Rope, standard_rope

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
TYPES = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    "yarn": YARN,
    "llama3": LLAMA3,
}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16,
    "original_max_position_embeddings": 64, "factor": 8.0,
}  # fmt: skip
LOSSLESS = "window:sinks=4,recent=32,exact=fp32+exact:dtype=fp32,pre_rope=true"


def llama(rope_type: str) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    shape = SHAPE | {"max_position_embeddings": 64}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**shape, **HEAD, rope_parameters=TYPES[rope_type])).eval()


def projected(model: tf.PreTrainedModel, layer: int, ids: torch.Tensor) -> torch.Tensor:
    """Return the keys of a layer before RoPE, as the model computes them: [B, Hkv, T, D]."""
    attention = model.model.layers[layer].self_attn
    source = attention.k_norm if hasattr(attention, "k_norm") else attention.k_proj
    kept = []
    handle = source.register_forward_hook(lambda module, args, out: kept.append(out))
    with torch.no_grad():
        model(ids, use_cache=False)
    handle.remove()
    out = kept[0]
    out = out if out.dim() == 4 else out.unflatten(-1, (2, -1))
    return out if out.shape[1] == 2 else out.transpose(1, 2)


def without_rope(rotary, x, first=0):
    return rotary.rope.invert(x, *rotary.angles(first, x.shape[2], x.device).cos_sin())


@pytest.mark.parametrize("rope_type", TYPES)
def test_keys_without_rope_are_the_projected_ones(rope_type):
    model, ids = llama(rope_type), prompt(100)  # beyond the 64 tokens from which dynamic frequencies change
    rotary = Rotary(Ropes(model.config, 32).of(0))
    rotary.note(0, 100)
    layer = capture(model, ids)[0]
    torch.testing.assert_close(without_rope(rotary, layer.keys), projected(model, 0, ids), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma3", "qwen3", "phi3"])
def test_keys_of_other_models(models, name):
    """Two frequencies by layer type (gemma3), normalised keys, and a fused projection (phi3: RoPE
    is inverted and applied)."""
    model, ids = models[name], prompt(80)
    ropes = Ropes(model.config.get_text_config(), model.config.get_text_config().head_dim if name != "phi3" else 16)
    for index, layer in enumerate(capture(model, ids)):
        rotary = Rotary(ropes.of(index))
        plain = without_rope(rotary, layer.keys)
        torch.testing.assert_close(
            rotary.rope.apply(plain, *rotary.angles(0, 80, plain.device).cos_sin()), layer.keys, atol=1e-5, rtol=1e-4
        )
        if name != "phi3":
            torch.testing.assert_close(plain, projected(model, index, ids), atol=2e-5, rtol=1e-4)


def test_interleaved_and_partial_rotation():
    """GLM rotates pairs of adjacent channels, and only half of the channels."""
    torch.manual_seed(0)
    model = tf.GlmForCausalLM(tf.GlmConfig(**SHAPE, **HEAD, attention_bias=False)).eval()
    ids = prompt(40)
    rotary = Rotary(Ropes(model.config, 32).of(0))
    keys = capture(model, ids)[0].keys
    torch.testing.assert_close(without_rope(rotary, keys), projected(model, 0, ids), atol=2e-5, rtol=1e-4)


def test_lengths_that_changed_between_calls():
    """Dynamic NTK: keys keep the frequencies of the call that appended them."""
    rope = Ropes(llama("dynamic").config, 32).of(0)
    assert rope.varies
    rotary = Rotary(rope)
    x = torch.randn(1, 2, 200, 32)
    pieces, place = [], 0
    for n in (90, 1, 1, 108):
        rotary.note(place, n)
        cos, sin = rope.cos_sin(place, n, place + n, x.device)
        pieces.append(rope.apply(x[:, :, place : place + n], cos[None], sin[None]))
        place += n
    torch.testing.assert_close(
        without_rope(rotary, torch.cat(pieces, 2)[:, :, 50:], 50), x[:, :, 50:], atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("parameters", [LONGROPE, TYPES["dynamic"]], ids=["longrope", "dynamic"])
@pytest.mark.parametrize("padding", [[0], [0, 7]], ids=["one", "padded"])
def test_generated_tokens_share_a_run_until_the_frequencies_change(parameters, padding):
    """A step would take time for each run."""
    config = tf.LlamaConfig(**SHAPE | {"max_position_embeddings": 64}, **HEAD, rope_parameters=parameters)
    rope = Ropes(config, 32).of(0)
    rotary, expected, place = Rotary(rope), [], 0
    for n in (60, 1, 1, 1, 1, 1, 20):
        rotary.note(place, n, None if place or len(padding) == 1 else torch.tensor(padding))
        expected.append([torch.stack(rope.cos_sin(place - p, n, place + n, "cpu")) for p in padding])
        place += n
        assert rotary.angles(0, place, "cpu").is_small == (place <= 64)
    assert rotary.starts == [0, 64] if parameters is LONGROPE else [0, 64, 65]
    wanted = torch.stack([torch.cat(pieces, 1) for pieces in zip(*expected, strict=True)], 1)
    for first, n in ((0, 85), (0, 64), (66, 19), (60, 8)):
        got = torch.stack(rotary.angles(first, n, "cpu").cos_sin())
        torch.testing.assert_close(got, wanted[:, :, first : first + n], atol=1e-5, rtol=1e-4)
    places = torch.tensor([80, 13, 65, 12])
    got = torch.stack(rotary.at(places.expand(len(padding), 1, -1)).cos_sin())
    torch.testing.assert_close(got.flatten(1, -3), wanted[:, :, places], atol=1e-5, rtol=1e-4)
    rotary.select(torch.tensor([len(padding) - 1]))  # keys keep the frequencies of the batch that they were added in
    got = torch.stack(rotary.angles(0, 85, "cpu").cos_sin())
    torch.testing.assert_close(got[:, 0], wanted[:, -1], atol=1e-5, rtol=1e-4)
    rotary.note(40, 1)  # after a crop
    assert rotary.starts == [0]


def test_a_table_without_a_length_has_the_frequencies_of_long_texts():
    """Policies that evict use it for all tokens."""
    config = tf.LlamaConfig(**SHAPE | {"max_position_embeddings": 64}, **HEAD, rope_parameters=LONGROPE)
    rope = Ropes(config, 32).of(0)
    cos, sin = (x[0] for x in rope.angles_at(torch.arange(300)).cos_sin())
    for x, y in zip((cos, sin), rope.cos_sin(0, 300, 300, "cpu"), strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_an_embedding_that_looks_at_the_length_itself():
    """PhiMoE scales cosines by a factor that depends on the last position."""
    parameters = LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.3}
    config = tf.PhimoeConfig(
        **SHAPE | {"max_position_embeddings": 64}, **HEAD, num_local_experts=2, rope_parameters=parameters
    )
    rope = Ropes(config, 32).of(0)
    assert rope.frequencies(30) == rope.frequencies(60) != rope.frequencies(100)
    assert float(torch.hypot(*rope.cos_sin(5, 1, 100, "cpu"))[0, 0]) > 1.2


def test_rope_is_made_on_the_cpu():
    """Whatever device is the default, here and when it is used."""
    config = llama("default").config
    with torch.device("meta"):
        rope = Ropes(tf.LlamaConfig(**SHAPE, **HEAD, rms_norm_eps=1e-4), 32).of(0)
        assert rope.cos_sin(3, 2, 5, torch.device("cpu"))[0].device.type == "cpu"
    assert Ropes(config, 32).of(0).angles_at(torch.tensor([1, 2])).cos_sin()[0].device.type == "cpu"


def test_standard_rope_is_llamas():
    rope, model = standard_rope(32), llama("default")
    ours, theirs = rope.cos_sin(7, 5, 0, "cpu"), Ropes(model.config, 32).of(0).cos_sin(7, 5, 0, "cpu")
    x = torch.randn(1, 2, 5, 32)
    torch.testing.assert_close(rope.apply(x, *(t[None] for t in ours)), rope.apply(x, *(t[None] for t in theirs)))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "qwen3", "gpt_oss", "phi3"])
@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_equal_the_full_cache(models, name, batch):
    """Greedy tokens over keys stored without RoPE; batches of several rows are padded on the left."""
    model, ids = models[name], prompt(150, batch)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 17 * row] = 0
        ids[row, : 17 * row] = 0
    options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    expected = model.generate(ids, **options)
    with tersekv.compress(model, LOSSLESS):
        out = model.generate(ids, **options)
    assert torch.equal(out, expected)


def test_rollback_and_second_turn(models):
    model, ids = models["llama"], prompt(200)
    cache = tersekv.CompressedCache(model.config, LOSSLESS)
    with tersekv.compress(model, LOSSLESS), torch.no_grad():
        model(ids[:, :180], past_key_values=cache)
        cache.crop(-70)
        again = model(ids[:, 110:], past_key_values=cache).logits
    with torch.no_grad():
        expected = model(ids).logits[:, 110:]
    torch.testing.assert_close(again, expected, atol=1e-4, rtol=1e-4)


def test_any_method_takes_keys_before_rope():
    for recipe in ("kivi:bits=2,pre_rope=true", "qjl:pre_rope=true", "polarquant:pre_rope=true/kivi"):
        parsed = tersekv.Recipe.parse(recipe)
        plan = parsed.plan(20, 30)
        assert plan.keys.pre_rope
        assert not plan.values.pre_rope
        assert tersekv.Recipe.parse(str(parsed)) == parsed
        assert tersekv.Recipe.from_json(parsed.to_json()) == parsed
    assert not tersekv.Recipe.parse("kivi").plan(0, 1).keys.pre_rope


def test_a_model_without_rope_is_refused():
    config = tf.GPT2Config(n_embd=64, n_head=2, n_layer=1, vocab_size=97)
    with pytest.raises(UserError, match="gpt2 models cannot be coded before RoPE; use pre_rope=false"):
        tersekv.CompressedCache(config, "kivi:pre_rope=true")


def tensors_of(x, seen):
    """Return all tensors that an object holds, through its fields, lists and dicts."""
    if isinstance(x, torch.Tensor):
        return [x]
    if id(x) in seen or isinstance(x, Rope) or not (isinstance(x, (list, tuple, dict)) or hasattr(x, "__dict__")):
        return []  # RoPE exists once per model
    seen.add(id(x))
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else vars(x).values()
    return [tensor for part in parts for tensor in tensors_of(part, seen)]


KEPT = ["kivi:bits=4", "kivi:pre_rope=true", "turboquant:bits=2", "trellis:calibration=prompt,bits=2"]


@pytest.mark.parametrize("codec", [*KEPT, "turboquant:bits=2.5"])
def test_a_store_holds_what_its_footprint_counts(llama, codec):
    """Views are cached between steps if they hold only packed tensors and tables, which are
    counted."""
    recipe = f"window:sinks=4,recent=16+{codec}"
    cache = tersekv.CompressedCache(llama.config, recipe)
    with tersekv.compress(llama, recipe), torch.no_grad():
        llama(prompt(200), past_key_values=cache)
        llama(prompt(1), past_key_values=cache)
    for layer in cache.layers:
        store = layer.store
        assert (store._pages is not None) == (codec in KEPT)
        planes = [plane for side in store.sides for page in side.packed.pages for plane in page.planes.values()]
        counted = {x.untyped_storage().data_ptr() for x in [*planes, *store.tables()]}
        if store._pages is not None:
            for x in tensors_of((store._pages.keys, store._pages.values, store._pages.maps), set()):
                shared = x.untyped_storage().data_ptr() in counted
                one_place_per_row = x.dtype is torch.int32 and x.numel() == store.batch_size
                assert shared or one_place_per_row, f"{codec}: a kept view holds {tuple(x.shape)} of its own"


def test_rows_with_padding_are_kept(llama):
    """Each row begins at its own position, and their cosines come from one table."""
    recipe = "window:sinks=4,recent=16+kivi:pre_rope=true"
    cache = tersekv.CompressedCache(llama.config, recipe)
    mask = torch.ones(2, 201, dtype=torch.long)
    mask[1, :7] = 0
    with tersekv.compress(llama, recipe), torch.no_grad():
        llama(prompt(200, batch=2), attention_mask=mask[:, :200], past_key_values=cache)
        llama(prompt(1, batch=2), attention_mask=mask, past_key_values=cache)
    assert all(layer.store._pages for layer in cache.layers)


@pytest.mark.parametrize("theta", [100.0, 10_000.0, 1e6])
@pytest.mark.parametrize("columns", [4, 64])
def test_offset_tables_continue_from_any_token(theta, columns):
    """cos(n + m)θ from cos nθ, sin nθ and the terms of m offsets, for columns of high and low
    frequency."""
    rope = standard_rope(columns, theta)
    steps, (cos, sin) = rope.offset_table(), (x[0] for x in rope.angles(0, 5000).rows())
    M, terms = steps.table.shape[1], steps.matrix.shape[1]
    fast, slow = int(steps.place.max()) + 1, len(steps.matrix) // 2
    for column in range(columns // 2):  # the other half is the same
        place = int(steps.place[column])
        if place >= 0:
            c, s = steps.table[place], steps.table[fast + place]
        else:
            c, s = steps.matrix[[-1 - place, slow - 1 - place]] @ steps.table[-terms:]
        n = 4321
        expected = cos[n, column] * c - sin[n, column] * s
        torch.testing.assert_close(expected, cos[n : n + M, column], atol=2e-4, rtol=0)  # float32 angles
    assert len(steps.table) == 2 * fast + (terms if len(steps.matrix) else 0)
    assert columns < 64 or theta == 100 or len(steps.table) < 0.7 * columns, "slow columns share no polynomial"


@pytest.mark.parametrize("rope_type", ["default", "linear", "yarn", "llama3"])
def test_the_table_equals_the_models_rope(rope_type):
    """At any position, up to float32 rounding of the model's own angles, which grows with the
    position."""
    rope = Ropes(llama(rope_type).config, 32).of(0)
    positions = torch.tensor([0, 1, 63, 64, 65, 4095, 4096, 9_999, 131_071, 300_000])
    ours, theirs = rope.angles_at(positions).cos_sin(), rope._made(positions, 1)
    for x, y in zip(ours, theirs, strict=True):
        error = (x[0] - y).abs().amax(-1)
        assert (error < 1e-5 + 3e-7 * positions).all(), error
    back = rope.angles_at(-positions).cos_sin()
    torch.testing.assert_close(back[0], ours[0])
    torch.testing.assert_close(back[1], -ours[1])


def test_the_mean_before_rope_divides_by_the_scale():
    """YaRN multiplies cosines and sines by a factor, so that the transpose is not the inverse."""
    rope, x = Ropes(llama("yarn").config, 32).of(0), torch.randn(1, 2, 50, 32)
    angles = rope.angles(7, 50)
    expected = rope.invert(x, *angles.cos_sin()).mean(2, keepdim=True)
    torch.testing.assert_close(coding._mean_without_rope([coding.Tokens(x, angles)]), expected)


def test_the_table_does_not_grow_with_tokens():
    rope = standard_rope(64)
    held = set()
    for first in (0, 1_000_000, 16_000_000):
        rope.angles(first, 300).cos_sin()
        held.add(
            sum(x.numel() * x.element_size() for x in rope.tables(torch.device("cpu"), stepped=True, int16_channels=64))
        )
    assert len(held) == 1
    with pytest.raises(UserError, match="position 16,777,216 was given; positions up to 16,777,215 are allowed"):
        rope.angles(16_777_200, 17)
    with pytest.raises(UserError, match="position 16,777,216 was given"):
        rope.angles_at(torch.tensor([5, 1 << 24]))


def test_angles_that_are_not_proportional_come_from_the_model():
    of = standard_rope(32)
    bent = Rope(lambda positions, length: of._cos_sin(positions**2 // 100, length), of._apply)
    assert of.is_proportional()
    assert not bent.is_proportional()


def test_a_config_is_looked_at_once(monkeypatch):
    """A further cache of an equal config builds nothing, one of another config does."""
    made = []
    for name in ("_make", "_look"):
        whole = getattr(Ropes, name)
        monkeypatch.setattr(Ropes, name, lambda self, *args, whole=whole: made.append(whole) or whole(self, *args))
    for theta, expected in ((12_345.0, 2), (12_345.0, 2), (23_456.0, 4)):
        shape = SHAPE | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
        ropes = Ropes(tf.LlamaConfig(**shape, **HEAD), 32)
        assert ropes.of(0) is ropes.of(1)
        assert len(made) == expected


def test_layers_of_a_type_share_their_rope_whatever_was_built_before(monkeypatch):
    """Also if RoPE of as many other models is kept as is allowed."""
    theta = {"rope_type": "default", "rope_theta": 54_321.0}
    types = ["sliding_attention", "full_attention"]
    parameters = {"sliding_attention": theta, "full_attention": theta}
    config = tf.Gemma3TextConfig(
        **SHAPE | {"num_hidden_layers": 4, "rope_parameters": parameters}, layer_types=2 * types
    )
    for others in range(rope_file.MOST_BUILT + 1):
        monkeypatch.setattr(rope_file, "_built", dict.fromkeys([(str(n), None) for n in range(others)]))
        a, b, c, d = map(Ropes(config, config.head_dim).of, range(4))
        assert a is c is not b
        assert b is d
