"""`tersekv chat`: turns, commands, files and Ctrl-C, on a tiny model."""

from __future__ import annotations

import copy
import io
import os
import signal
import sys
import threading

import pytest
import torch

import tersekv
from tersekv import cli
from tersekv.calibration.text import common_ids
from tersekv.cli import chat
from tersekv.cli.turns import Turns
from tersekv.errors import UserError
from tersekv.models import loading
from tersekv.recipe import Recipe
from tersekv.serving.local.answers import Sampling
from tersekv.serving.local.engine import Engine
from test_cli import run_json

QUESTION = "Tell me all that you know about caches."


@pytest.fixture
def say(tiny, monkeypatch, capfd):
    """Run `tersekv chat` with lines on standard input; return stdout's and stderr's lines."""

    def run(*lines: str, options: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        assert cli.run(["chat", tiny, "-r", "kivi:bits=4", "--max-new-tokens", "8", *options]) == 0
        out, err = capfd.readouterr()
        return out.splitlines(), err.splitlines()

    return run


@pytest.fixture(scope="module")
def network(tiny):
    return loading.load(tiny)


@pytest.fixture
def talk(network):
    model, tokenizer = network
    return chat.Chat(model, tokenizer, Recipe.parse("kivi:bits=4"), None, Sampling(8, temperature=0), None)


@pytest.fixture
def fed(network):
    """Numbers of tokens of the model's passes."""
    numbers: list[int] = []
    hook = network[0].register_forward_pre_hook(
        lambda _, args, kwargs: numbers.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    yield numbers
    hook.remove()


def test_piped_lines(say, tmp_path):
    file = tmp_path / "a.cache"
    out, err = say(
        QUESTION, "/size", f"/save {file}", "", "/reset", "/size", f"/load {file}", "Why?", "/quit", "Not read."
    )
    held = next(line for line in out if "tokens" in line)
    assert held.startswith("CompressedCache(kivi:bits=4): 49 tokens")
    assert any(line.startswith(f"{file}: CompressedCache(kivi:bits=4): 49 tokens") for line in out)
    assert out.count("CompressedCache(kivi:bits=4): empty") == 1
    assert err == []


def test_wrong_lines_do_not_end_the_chat(say, tmp_path):
    (tmp_path / "none").write_text("no cache")
    out, err = say("/what", "/save", "/save /nonexistent/a", "/save a.cache", f"/load {tmp_path / 'none'}", "/help")
    assert [line.split(":", 1)[0] for line in err] == ["tersekv"] * 5
    assert "/what is not a command; /help lists them" in err[0]
    assert "/save needs a file" in err[1]
    assert err[2] == "tersekv: /save /nonexistent/a: there is no folder /nonexistent; make it first, or give another"
    assert "the cache is empty" in err[3]
    assert any(line.startswith("/reset") for line in out)


def test_a_turn_reads_its_own_tokens_only(talk, fed, capsys):
    talk.ask(QUESTION)
    assert fed == [len(QUESTION) + 3, *[1] * 7]
    fed.clear()
    talk.ask("Why?")
    assert fed[0] == 1 + len("<end><user>") - 9 + len("Why?") + 2  # the last token of the answer, and the turn
    assert talk.cache.get_seq_length() == len(talk.turns.ids) - 1


def test_a_document_precedes_the_first_question_only(talk, fed, capsys):
    talk.document = talk.unread = "A text. " * 20
    for _ in range(2):
        talk.ask("Who?")
        assert fed[0] == 160 + len("\n\nWho?") + 3
        fed.clear()
        talk.ask("Who?")
        assert fed[0] < 20
        talk.reset()
        fed.clear()


def test_a_document_follows_a_loaded_conversation(say, tiny, monkeypatch, capfd, tmp_path):
    file, text = tmp_path / "a.cache", tmp_path / "doc.txt"
    text.write_text("A text. " * 20)
    say(QUESTION, f"/save {file}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\n/size\n"))
    assert cli.run(["chat", tiny, "--load", str(file), "--file", str(text), "--max-new-tokens", "8"]) == 0
    said = next(line for line in capfd.readouterr().out.splitlines()[1:] if line.startswith("CompressedCache"))
    assert int(said.split(": ")[1].split()[0]) > 49 + 160


@pytest.mark.parametrize("how", ["--load", "/load"])
def test_a_storage_file_is_loaded_into_the_recipe(tiny, monkeypatch, capfd, tmp_path, how):
    file = tmp_path / "a.cache"
    run_json(capfd, "prompt-cache", "build", "-p", "A text. " * 20, "-m", tiny, "--storage", "8", "-o", str(file))
    options, lines = (["--load", str(file)], []) if how == "--load" else ([], [f"/load {file}"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*lines, "/size"])))
    assert cli.run(["chat", tiny, "-r", "kivi:bits=2", *options]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("CompressedCache(kivi:bits=2): 16")


def test_a_prompt_is_read_in_chunks(network, fed, capsys):
    model, tokenizer = network
    sampling = Sampling(8, temperature=0, prefill_chunk=16)
    talk = chat.Chat(model, tokenizer, Recipe.parse("kivi:bits=4"), None, sampling, None)
    talk.ask(QUESTION)
    read = len(QUESTION) + 3
    assert fed == [*[16] * (read // 16), read % 16, *[1] * 7]
    engine = Engine(model, tokenizer, tersekv.CompressedCache(model, "kivi:bits=4"), 1 << 20, prefill_chunk=16)
    fed.clear()
    engine.answer(engine.ids(QUESTION), Sampling(2, temperature=0), lambda text: None, threading.Event())
    engine.close()
    assert fed[:2] == [16, 16]


def test_a_file_of_prompt_cache_build_is_continued(tiny, talk, fed, tmp_path, capfd):
    """The question is added to the turn that the file has begun."""
    file, text = tmp_path / "doc.cache", "An article about caches. " * 16
    run_json(capfd, "prompt-cache", "build", "-r", "kivi:bits=4", "-p", text, "-m", tiny, "-o", str(file))
    talk.load(str(file))
    whole = Turns(talk._tokenizer).prompt(f"{text}\n\nWho?")
    assert torch.equal(talk.turns.prompt("Who?"), whole)
    fed.clear()
    talk.ask("Who?")
    assert fed[0] == whole.shape[1] - len(text) - 1


@pytest.mark.parametrize(
    ("question", "answer", "document"),
    [
        ("USER: {}\nASSISTANT:", "{}</s>", "Two lines.\n\nASSISTANT is a word."),
        ("[INST] {} [/INST]", " {} </s>", "A list [1] of [two]."),
    ],
    ids=["vicuna", "llama-2"],
)
def test_a_built_file_is_continued_in_a_turn_without_end_tokens(network, question, answer, document):
    tokenizer = copy.copy(network[1])
    asked, said = (part.format("{{ m.content }}") for part in (question, answer))
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{{% if m.role == 'user' %}}{asked}{{% else %}}{said}{{% endif %}}{{% endfor %}}"
    )
    turns = Turns(tokenizer)
    turns.ids = common_ids(tokenizer, document, network[0].config)[0].tolist()
    whole = Turns(tokenizer).prompt(f"{document}\n\nWho?")
    assert torch.equal(turns.prompt("Who?"), whole)
    turns.ids = [*whole[0].tolist(), *tokenizer("me")["input_ids"]]
    assert tokenizer.decode(turns.prompt("Why?")[0]).endswith(answer.format("me").lstrip() + question.format("Why?"))


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(talk, network, capsys):
    passes = []

    def interrupt(*_):
        passes.append(1)
        if len(passes) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    hook = network[0].register_forward_hook(interrupt)
    talk.ask(QUESTION)
    hook.remove()
    assert "[stopped]" in capsys.readouterr().out
    held = len(QUESTION) + 3 + 3
    assert talk.cache.get_seq_length() == held
    assert len(talk.turns.ids) == held
    talk.ask("Why?")
    assert talk.cache.get_seq_length() > held


def test_ctrl_c_while_the_question_is_read_leaves_it_out(talk, network, capsys):
    talk.ask("Who?")
    before = list(talk.turns.ids)
    hook = network[0].model.layers[0].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
    talk.ask(QUESTION)
    hook.remove()
    assert "the question is left out" in capsys.readouterr().out
    assert talk.turns.ids == before
    talk.ask("Why?")
    assert len(talk.turns.ids) > len(before)


def test_ctrl_c_between_chunks_leaves_a_cache_that_can_be_saved(network, capsys, tmp_path):
    sampling, passes = Sampling(8, temperature=0, prefill_chunk=16), []
    talk = chat.Chat(*network, Recipe.parse("kivi:bits=4"), None, sampling, None)
    talk.ask("Who?")

    def interrupt(*_):
        passes.append(1)
        if len(passes) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    hook = network[0].register_forward_hook(interrupt)
    talk.ask(QUESTION * 4)
    hook.remove()
    assert "the question is left out" in capsys.readouterr().out
    assert talk.cache.get_seq_length() == len(talk.turns.ids) - 1
    talk.save(str(tmp_path / "a.cache"))


def test_ctrl_c_at_the_prompt_and_the_end_of_input(monkeypatch, capsys):
    given = iter([KeyboardInterrupt(), " a ", "", EOFError()])

    def fake(prompt):
        one = next(given)
        if isinstance(one, BaseException):
            raise one
        return one

    monkeypatch.setattr("builtins.input", fake)
    assert list(chat._lines(lambda: "> ")) == ["a"]


def test_the_context_is_a_limit(talk):
    with pytest.raises(UserError, match=r"this model's context is 2,048: /reset"):
        talk.ask("a" * 2040)
    talk.ask("a")


def test_turns_follow_the_template(network):
    _, tokenizer = network
    with pytest.raises(UserError, match="no chat template, so it cannot chat"):
        Turns(type("Plain", (), {"chat_template": None})())
    turns = Turns(tokenizer)
    turns.ids = [*turns.prompt("one")[0].tolist(), *tokenizer("yes")["input_ids"]]
    said = tokenizer.decode(turns.prompt("two")[0])
    assert said == "<|user|>one<|end|><|answer|>yes<|end|><|user|>two<|end|><|answer|>"


def test_templates_without_ends_or_earlier_answers(network):
    tokenizer = copy.copy(network[1])
    turns = Turns(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    turns.ids = tokenizer("oneyes")["input_ids"]
    assert tokenizer.decode(turns.prompt("two")[0]) == "oneyestwo"
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match="leaves earlier answers out"):
        turns.prompt("two")


def test_wrong_options(tiny, capfd, talk, tmp_path):
    talk.ask(QUESTION)
    talk.save(str(tmp_path / "a.cache"))
    for options, words in (
        (("--dtype", "int8"), "is not one of: auto"),
        (("--load", "/none"), "/none"),
        (("--load", str(tmp_path / "a.cache"), "-r", "kivi"), "leave -r and --system out"),
    ):
        assert cli.run(["chat", tiny, *options]) == 2
        assert words in capfd.readouterr().err


def test_a_batch_is_refused(talk, network, tmp_path):
    model, _ = network
    ids = torch.arange(80).view(2, 40) + 3
    cache = tersekv.CompressedCache(model, "kivi:bits=4")
    with tersekv.compress(model, cache), torch.no_grad():
        model(ids, past_key_values=cache)
    cache.save(tmp_path / "b.cache", ids, model)
    with pytest.raises(UserError, match="without token ids, or is a batch"):
        talk.load(str(tmp_path / "b.cache"))
