"""Answers on one machine: stop strings, prompt caches, and the OpenAI-compatible server with OpenAI's client."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import tersekv
from conftest import prompt
from tersekv.hf.token_ids import without_padding
from tersekv.models import loading
from tersekv.serving.local.answers import Sampling, Stop, Stopped, Text, answer
from tersekv.serving.local.engine import Engine
from tersekv.serving.local.prompt_caches import PromptCaches
from tersekv.serving.local.requests import RequestError, read

RECIPE = "kivi:bits=4"
GREEDY = Sampling(8, temperature=0)
MESSAGES = [{"role": "user", "content": "Tell me about caches that are packed to few bits."}]


class Letters:
    """A tokenizer of UTF-8 bytes."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    ("said", "stop", "shown"),
    [
        ("one two three", (), "one two three"),
        ("one two three", ("two",), "one "),
        ("one two three", ("three!", "wo"), "one t"),
        ("aab aaab", ("aaab",), "aab "),
        ("déjà vu ✓", ("vu ✗",), "déjà vu ✓"),
        ("\u2713\u2713", ("\u2713",), ""),
    ],
)
def test_stop_strings_are_never_shown(said, stop, shown):
    pieces: list[str] = []
    text = Text(Letters(), stop, pieces.append)
    ended = any(text.add(id) for id in said.encode())
    text.end()
    assert text.text == "".join(pieces) == shown
    assert ended == (shown != said)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_completion_keeps_the_space_before_its_first_word():
    """Decoders of sentencepiece's tokenizers remove it from the first token."""
    made = Tokenizer(WordLevel({"▁is": 0, "▁Paris": 1, "x": 2}, unk_token="x"))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="x")
    for before, shown in (([0], " Paris"), ([], "Paris")):
        text = Text(tokenizer, (), lambda _: None, before)
        text.add(1)
        text.end()
        assert text.text == shown


def filled(model, ids, caches):
    cache = caches.take(ids)
    with tersekv.compress(model, cache), torch.no_grad():
        cache.keep_common(ids)
        model(ids[:, cache.get_seq_length() :], past_key_values=cache)
    caches.keep(cache)
    return cache


def test_prompt_caches(llama):
    """A chat goes on with its cache. Another prompt with the same start gets a copy, another text a new one."""
    caches = PromptCaches(lambda: tersekv.CompressedCache(llama, RECIPE), 1 << 30)
    ids = prompt(200)
    first = filled(llama, ids, caches)
    assert filled(llama, torch.cat([ids, prompt(20, seed=1)], dim=1), caches) is first
    assert len(caches) == 1
    branch = torch.cat([ids[:, :150], prompt(60, seed=2)], dim=1)
    copied = filled(llama, branch, caches)
    assert copied is not first
    assert copied.token_ids.common(without_padding(branch)) == 210
    assert first.get_seq_length() == 220
    assert filled(llama, prompt(100, seed=3), caches).get_seq_length() == 100
    assert len(caches) == 3
    little = torch.cat([ids[:, :60], prompt(60, seed=4)], dim=1)  # less than half of what the first was fitted on
    assert caches.take(little).get_seq_length() == 0


def test_prompt_caches_have_a_limit(llama):
    caches = PromptCaches(lambda: tersekv.CompressedCache(llama, RECIPE), 1 << 30)
    made = [filled(llama, prompt(200, seed=seed), caches) for seed in range(3)]
    one = made[0].footprint().total_bytes
    assert caches.bytes() == 3 * one
    caches._most = int(2.5 * one)
    caches.keep(caches.take(prompt(9, seed=9)))  # an empty cache is not kept
    assert len(caches) == 2
    assert caches.take(prompt(201, seed=0)).get_seq_length() == 0  # the oldest one is gone
    assert filled(llama, prompt(200, seed=2), caches).get_seq_length() == 200
    caches._most = 1
    caches.keep(made[1])
    assert len(caches) == 0


@pytest.fixture(scope="module")
def network(tiny):
    return loading.load(tiny)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_stopped_prompt_leaves_a_cache_that_goes_on(network, layer):
    model, tokenizer = network
    ids, cache, stop = prompt(120), tersekv.CompressedCache(model, RECIPE), Stop()
    hook = model.model.layers[layer].register_forward_hook(lambda *_: stop.set())
    with tersekv.compress(model, cache):
        answer(model, tokenizer, cache, ids, GREEDY, lambda text: None, Stop())
        with pytest.raises(Stopped):
            answer(model, tokenizer, cache, torch.cat([ids, ids], dim=1), GREEDY, lambda text: None, stop)
        hook.remove()
        assert len(set(cache.progress.num_tokens().values())) == 1
        wanted = answer(model, tokenizer, tersekv.CompressedCache(model, RECIPE), ids, GREEDY, str, Stop())
        again = answer(model, tokenizer, cache, ids, GREEDY, str, Stop())
    assert (again.ids, again.cached) == (wanted.ids, 119)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": 3}, "model"),
        ({"model": "other"}, "model"),
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": "1"}, "top_p"),
        ({"seed": 2**70}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, None),
        ({"stream_options": [1]}, "stream_options"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{}]}, "tools"),
    ],
)
def test_wrong_requests_name_the_field(change, field):
    body = {"model": "m", "messages": MESSAGES} | change
    if field is None:
        read(body, "m", True, 9)
        return
    with pytest.raises(RequestError) as caught:
        read(body, "m", True, 9)
    assert caught.value.document()["error"]["param"] == field
    assert caught.value.status == (404 if change.get("model") == "other" else 400)


def test_requests_are_read():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "developer", "content": parts}], "stop": "x", "seed": 1, "n": 1, "user": "me"}
    request = read(body, "m", True, 9)
    assert request.prompt == [{"role": "system", "content": "ab"}]
    assert request.sampling == Sampling(9, None, None, 1, ("x",))
    for given, taken in ((2, 2.0), (0.3, 0.3), (1e-40, 0.0), (0, 0.0)):
        temperature = read(body | {"temperature": given}, "m", True, 9).sampling.temperature
        assert temperature == taken
        assert type(temperature) is float  # transformers refuses a whole number
    assert read({"prompt": ["text"]}, "m", False, 9).prompt == "text"
    assert torch.equal(read({"prompt": [1, 2]}, "m", False, 9).prompt, torch.tensor([[1, 2]]))
    for wrong in (None, "", [], ["a", "b"], [1, "a"], [True], [2**80], {}):
        with pytest.raises(RequestError):
            read({"prompt": wrong}, "m", False, 9)


# ---------------------------------------------------------------------- the server


@pytest.fixture(scope="module")
def server(network):
    """Serve the tiny model in a thread; yield the address and the engine."""
    with serving(network) as (address, engine, _):
        yield address, engine


@contextlib.contextmanager
def serving(network):
    """Serve the tiny model in a thread; yield the address, the engine and what ends the server."""
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    pytest.importorskip("starlette", reason="the extra `serve` is not installed")
    from tersekv.serving.local.app import Server, Web

    model, tokenizer = network
    engine = Engine(model, tokenizer, tersekv.CompressedCache(model, RECIPE), 1 << 30)
    running = Web(Server("tiny", engine, 16))
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()

    def end():
        running.should_exit = True
        thread.join(30)

    yield f"http://127.0.0.1:{listening.getsockname()[1]}", engine, end
    end()
    engine.close()


@pytest.fixture
def client(server):
    return connected(server[0])


def connected(address):
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed (extra `dev`)")
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)


def test_models(client):
    import openai

    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "tersekv"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist here"):
        client.models.retrieve("other")


def test_a_chat_reads_its_new_tokens_only(client):
    first = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, temperature=0)
    assert first.usage.completion_tokens == 8
    assert first.choices[0].finish_reason == "length"
    messages = [*MESSAGES, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "More!"}]
    second = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
    held = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens - 2 <= held < second.usage.prompt_tokens


def test_streams_say_what_whole_answers_say(client):
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 1.3, "seed": 5}
    whole = client.chat.completions.create(**asked)
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].delta.content or "" for p in pieces[:-1]) == whole.choices[0].message.content
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    other = client.chat.completions.create(**(asked | {"seed": 6}))
    assert other.choices[0].message.content != whole.choices[0].message.content


def test_completions_and_stop_strings(client):
    asked = {"model": "tiny", "prompt": "To be", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked).choices[0]
    assert whole.finish_reason == "length"
    stop = whole.text[5:7]
    cut = client.completions.create(**asked, stop=stop).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    streamed = list(client.completions.create(**asked, stop=[stop], stream=True))
    assert "".join(piece.choices[0].text for piece in streamed) == cut.text


def test_the_context_is_a_limit(client):
    import openai

    long = client.completions.create(model="tiny", prompt="a" * 2040, max_tokens=100, temperature=0)
    assert long.usage.total_tokens == 2048
    with pytest.raises(openai.BadRequestError, match="2,048 tokens, and this model's context is 2,048"):
        client.completions.create(model="tiny", prompt="a" * 2048)


@pytest.mark.parametrize(
    ("path", "data", "status", "words"),
    [
        ("/v1/chat/completions", b"{", 400, "the body is not JSON"),
        ("/v1/chat/completions", b"[" * 100000, 400, "the body is not JSON"),
        ("/v1/chat/completions", b"[]", 400, "not a JSON object but a list"),
        ("/v1/chat/completions", b"\xff", 400, "the body is not JSON"),
        ("/v1/completions", rb'{"prompt": "\ud800"}', 400, "half of a character"),
        ("/v1/completions", b'{"prompt": [999999]}', 400, "token ids that this model does not know"),
        ("/v1/elsewhere", b"{}", 404, "this server has /v1/models"),
        ("/v1/completions", None, 405, "Method Not Allowed"),
    ],
)
def test_errors_are_json(server, path, data, status, words):
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(server[0] + path, data)
    assert caught.value.code == status
    assert words in json.loads(caught.value.read())["error"]["message"]


def test_an_answer_that_fails_is_an_error_in_json(server, client, monkeypatch):
    import openai

    def fail(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr("tersekv.serving.local.engine.answer", fail)
    with pytest.raises(openai.InternalServerError, match="out of luck"):
        client.completions.create(model="tiny", prompt="a")
    with pytest.raises(openai.APIError, match="out of luck"):
        list(client.completions.create(model="tiny", prompt="a", stream=True))
    monkeypatch.undo()
    assert client.completions.create(model="tiny", prompt="a", max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_stops_when_its_client_leaves(server, client, network, stream):
    """Each token waits and none is the last, so that the answer would take minutes."""
    import openai

    tokens: list[float] = []

    def slow(module, args, out):
        out.logits[..., network[1].eos_token_id] = -1e9
        tokens.append(time.time())
        time.sleep(0.05)

    hook = network[0].register_forward_hook(slow)
    try:
        asked = {"model": "tiny", "prompt": "Once", "max_tokens": 1900, "temperature": 0}
        if stream:
            running = client.completions.create(**asked, stream=True)
            next(iter(running))
            running.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.5).completions.create(**asked)
        deadline = time.time() + 30
        while time.time() - tokens[-1] < 1:
            assert time.time() < deadline
            time.sleep(0.1)
    finally:
        hook.remove()
    assert client.completions.create(model="tiny", prompt="Once", max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize("stream", [True, False])
def test_an_end_of_the_server_is_said_to_clients_and_logs_no_error(network, caplog, stream):
    """Ctrl-C does not wait for a layer that takes longer than uvicorn's patience."""
    import openai

    layer, ended, asked = threading.Event(), threading.Event(), {"model": "tiny", "prompt": "Once", "max_tokens": 1900}
    with serving(network) as (address, _, end):

        def stay(*_):
            layer.set()
            ended.wait(10)

        hook = network[0].model.layers[1].register_forward_hook(stay)
        threading.Thread(target=lambda: (layer.wait(30), end())).start()
        try:
            with pytest.raises(openai.APIError, match="the server was ended before the end of the answer"):
                list(connected(address).completions.create(**asked, stream=stream))
        finally:
            hook.remove()
            ended.set()
    assert caplog.records == []
