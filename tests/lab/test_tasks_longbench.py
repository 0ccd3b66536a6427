"""LongBench: prompts, truncation in the middle, samples from a folder or the Hub, scores."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from conftest import data_folder
from fake_reader import FakeReader, ask
from tersekv.errors import UserError
from tersekv.lab.evals import longbench_data
from tersekv.lab.evals.longbench_data import DATASETS
from tersekv.lab.evals.tasks.longbench import LongBench, build

CLASSES = ["Food", "Other", "Other location"]


def sample(name: str, i: int = 0, words: int = 30) -> dict[str, Any]:
    answers = {"trec": ["Other location"], "passage_count": ["7"], "passage_retrieval_en": ["Paragraph 12"]}
    return {
        "input": f"What is {i}? ",
        "context": " ".join(f"w{k}" for k in range(words)),
        "answers": answers.get(name, [f"the answer {i}", "an other one"]),
        "all_classes": CLASSES if name == "trec" else None,
        "_id": f"id{i}",
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    longbench_data.samples.cache_clear()
    for name in DATASETS:
        lines = [json.dumps(sample(name, i), ensure_ascii=False) for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


def shared() -> Path:
    folder = data_folder()
    if folder is None or not (folder / "longbench" / "dataset2prompt.json").is_file():
        pytest.skip("LongBench's files are not next to the checkout")
    return folder / "longbench"


def test_prompts_are_the_official_ones() -> None:
    prompts, lengths = (json.loads((shared() / f"dataset2{what}.json").read_text()) for what in ("prompt", "maxlen"))
    assert {name: (d.prompt, d.new_tokens) for name, d in DATASETS.items()} == {
        name: (prompts[name], lengths[name]) for name in DATASETS
    }
    assert len(DATASETS) == 16


def test_qasper_to_the_letter() -> None:
    reader = FakeReader()
    case = build(reader, "qasper", DATASETS["qasper"], sample("qasper", 3, words=3), 3, 4096)
    rules = (
        "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered "
        'based on the information in the article, write "unanswerable". If the question is a yes/no question, answer '
        '"yes", "no", or "unanswerable". Do not provide any explanation.'
    )
    assert case.prompt.context == (
        f"You are given a scientific article and a question. Answer the question {rules}\n\nArticle: w0 w1 w2"
    )
    assert case.prompt.question == (
        f"\n\n Answer the question based on the above article {rules}\n\nQuestion: What is 3? \n\nAnswer:"
    )
    assert case.prompt.chat
    assert (case.id, case.new_tokens, case.expected) == ("qasper-3", 128, ("the answer 3", "an other one"))
    assert case.gold is None


@pytest.mark.parametrize("name", DATASETS)
def test_cut_in_the_middle(name: str, data: Path) -> None:
    reader = FakeReader()
    settings = DATASETS[name]
    whole = build(reader, name, settings, sample(name), 0, 8192).prompt
    length = settings.new_tokens + reader.tokens_of(whole) - 10
    cut = build(reader, name, settings, sample(name, words=30), 0, length)
    text, full = cut.prompt.context + cut.prompt.question, whole.context + whole.question
    tokens = reader.tokens_of(cut.prompt)
    assert length - 3 <= tokens + max(settings.new_tokens, reader.count_tokens(cut.gold or "")) <= length
    head = next(i for i in range(len(text) + 1) if not full.startswith(text[: i + 1]))
    assert full.endswith(text[head:])
    assert abs(reader.count_tokens(text[:head]) - reader.count_tokens(text[head:])) <= 4
    assert whole.question.endswith(cut.prompt.question)


def test_a_question_longer_than_half_the_prompt() -> None:
    long = {**sample("triviaqa"), "input": " ".join(f"q{k}" for k in range(100))}
    case = build(FakeReader(), "triviaqa", DATASETS["triviaqa"], long, 0, 32 + 100)
    assert case.prompt.question.endswith("q98 q99")
    assert case.prompt.context.startswith("Answer the question based on the given passage.")
    with pytest.raises(UserError, match="triviaqa does not fit into 33 tokens"):
        build(FakeReader(), "triviaqa", DATASETS["triviaqa"], long, 0, 33)


def test_turns_ends_and_answers(data: Path) -> None:
    reader = FakeReader()
    task = LongBench(samples=1, data=str(data))
    samples = task.instances(reader)
    plain = {s.data.cell["subtask"] for s in samples if not s.data.prompt.chat}
    assert plain == {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
    assert not [s.id for s in samples if s.data.prompt.question.endswith(" ")]
    ask(task, reader)
    by_name = {s.data.cell["subtask"]: asked for s, asked in zip(samples, reader.asked, strict=True)}
    assert {name: asked[1] for name, asked in by_name.items()} == {n: d.new_tokens for n, d in DATASETS.items()}
    assert [name for name, asked in by_name.items() if asked[4]] == ["samsum"]
    assert {name: asked[2] for name, asked in by_name.items() if asked[2]} == {
        "trec": " Other location",
        "passage_count": "7",
        "passage_retrieval_en": "Paragraph 12",
    }


@pytest.mark.parametrize(
    ("name", "answer", "score"),
    [
        ("hotpotqa", "an other one.", 1),
        ("hotpotqa", "other", 2 / 3),
        ("triviaqa", "\nother one\nand more", 1),
        ("gov_report", "the answer 0", 1),
        ("samsum", "an other one\nDialogue: the", 1),
        ("trec", "Other location\nFood", 1),
        ("trec", "Food, Other location", 0.5),
        ("passage_count", "7 of 9", 0.5),
        ("passage_retrieval_en", "Paragraph 12", 1),
        ("lcc", "# so\nthe answer 0", 1),
    ],
)
def test_scores(name: str, answer: str, score: float, data: Path) -> None:
    pytest.importorskip("rapidfuzz")
    task = LongBench(samples=3, subtasks=name, data=str(data))
    metrics = ask(task, FakeReader(lambda *_: answer))[0]
    assert metrics["accuracy"] == metrics[f"accuracy_{name}"] == pytest.approx(score, abs=1e-7)


def test_the_mean_is_over_datasets(data: Path) -> None:
    task = LongBench(samples=2, subtasks="trec,hotpotqa", data=str(data))
    metrics = ask(task, FakeReader(lambda *_: "Other location"))
    summary = task.summarise([*metrics, metrics[0]], [])
    assert summary["accuracy_trec"].mean == 1
    assert summary["accuracy"].mean == pytest.approx((1 + summary["accuracy_hotpotqa"].mean) / 2)


def test_samples_are_drawn(data: Path) -> None:
    def ids(**options: Any) -> list[str]:
        return [s.id for s in LongBench(data=str(data), subtasks="lcc", **options).instances(FakeReader())]

    assert ids(samples=3) == ids(samples=9) == ["lcc-0", "lcc-1", "lcc-2"]
    assert ids(samples=2) == ids(samples=2)
    assert len({tuple(ids(samples=2, seed=seed)) for seed in range(9)}) > 1


def test_a_folders_own_prompts(data: Path) -> None:
    (data / "dataset2prompt.json").write_text(json.dumps({"lcc": "Go on: {context}"}))
    (data / "dataset2maxlen.json").write_text(json.dumps({"lcc": 5}))
    (one,) = LongBench(samples=1, subtasks="lcc", data=str(data)).instances(FakeReader())
    assert one.data.prompt.context.startswith("Go on: w0")
    assert one.data.new_tokens == 5
    (data / "dataset2prompt.json").write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        LongBench(samples=1, subtasks="lcc", data=str(data)).instances(FakeReader())


def test_a_question_before_the_context() -> None:
    settings = DATASETS["qasper"]._replace(prompt="{input}\n{context}\nAnswer {input}")
    prompt = build(FakeReader(), "qasper", settings, sample("qasper", words=2), 0, 4096).prompt
    assert prompt.context + prompt.question == "What is 0? \nw0 w1\nAnswer What is 0?"


@pytest.mark.parametrize(
    ("what", "content", "said"),
    [
        ("prompt", [1], "is not a JSON object"),
        ("prompt", {"lcc": "Go on: {input}"}, "write a text with {context} exactly once"),
        ("prompt", {"lcc": "{context} {context}"}, "write a text with {context} exactly once"),
        ("prompt", {"lcc": 1}, "write a text with {context} exactly once"),
        ("maxlen", {"lcc": "5"}, "write a whole number from 1"),
    ],
)
def test_wrong_prompts_of_a_folder(what: str, content: Any, said: str, data: Path) -> None:
    (data / f"dataset2{what}.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=said):
        LongBench(samples=1, subtasks="lcc", data=str(data)).instances(FakeReader())


def test_half_of_a_character(data: Path) -> None:
    (data / "lcc.jsonl").write_text(json.dumps(sample("lcc") | {"context": "a \ud800"}))
    with pytest.raises(UserError, match=r"lcc in .*: the text holds half of a character"):
        LongBench(subtasks="lcc", data=str(data)).instances(FakeReader())


def test_all_means_available_datasets(data: Path) -> None:
    for name in DATASETS:
        if name not in ("qasper", "lcc"):
            (data / f"{name}.jsonl").unlink()
    found = LongBench(samples=1, data=str(data)).instances(FakeReader())
    assert [s.data.cell["subtask"] for s in found] == ["qasper", "lcc"]
    with pytest.raises(UserError, match=r"has no trec.jsonl: give a folder"):
        LongBench(subtasks="trec", data=str(data)).instances(FakeReader())


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_no_data(folder: str) -> None:
    with pytest.raises(UserError, match="or data=hub to download them"):
        LongBench(data=folder).instances(FakeReader())


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"context": "a"}', '{"context": 1, "input": "", "answers": ["a"]}']
)
def test_a_file_in_another_layout(content: str, data: Path) -> None:
    (data / "lcc.jsonl").write_text(content)
    with pytest.raises(UserError, match="download it again"):
        LongBench(subtasks="lcc", data=str(data)).instances(FakeReader())


def test_from_the_hub(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(data / "data.zip", "w") as archive:
        archive.write(data / "trec.jsonl", "data/trec.jsonl")
    asked = []

    def download(repo: str, name: str, **options: Any) -> str:
        asked.append((repo, name, options["repo_type"]))
        return str(data / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    found = LongBench(subtasks="trec", data="hub").instances(FakeReader())
    assert [s.id for s in found] == ["trec-0", "trec-1", "trec-2"]
    assert asked == [("zai-org/LongBench", "data.zip", "dataset")]


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    longbench_data.samples.cache_clear()
    with pytest.raises(UserError, match=r"from the Hub \(no connection\): download it on another machine"):
        LongBench(subtasks="trec", data="hub").instances(FakeReader())


def test_shared_samples() -> None:
    longbench_data.samples.cache_clear()
    found = LongBench(samples=4, data=str(shared())).instances(FakeReader())
    assert {s.data.cell["subtask"] for s in found} == {"hotpotqa", "qasper", "trec", "passage_retrieval_en"}
    assert len({s.id for s in found}) == len(found) == 16


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subtasks": "qaspar"}, "did you mean 'qasper'"),
        ({"length": "long"}, "length 'long' is not a number of tokens"),
        ({"samples": 0}, "samples=0 is not allowed"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        LongBench(**options)
