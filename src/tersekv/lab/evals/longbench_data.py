"""LongBench's sixteen English datasets: prompts, answer lengths, metrics, and samples from a folder
or the Hub.

Prompts and lengths are quoted from THUDM/LongBench (MIT), config/dataset2prompt.json and
dataset2maxlen.json. Their typos are kept ("asconcisely", the space before "Answer the question" in
qasper's). Files of these names in a folder replace them.
"""

from __future__ import annotations

import functools
import io
import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from tersekv.calibration.text import whole_characters
from tersekv.errors import UserError

HUB = "hub"
REPOSITORY, REVISION, ARCHIVE = "zai-org/LongBench", "5e628be450b7e67fb7ae6e201bd6d8f7056f7672", "data.zip"

_CONCISE = "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered "
_QASPER = (
    f'{_CONCISE}based on the information in the article, write "unanswerable". If the question is a yes/no question, '
    'answer "yes", "no", or "unanswerable". Do not provide any explanation.'
)
_STORY = "asconcisely as you can, using a single phrase if possible. Do not provide any explanation."
_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
_SEVERAL = (
    f"{_PASSAGES}\n\nThe following are given passages.\n{{context}}\n\n{_PASSAGES}\n\nQuestion: {{input}}\nAnswer:"
)


class Dataset(NamedTuple):
    """Settings of a dataset.

    - prompt: contains {context} and {input}.
    - new_tokens: maximum length of the answer.
    - chat: True if the prompt is a user's turn.
    - first_line: True if only the answer's first line counts.
    - question: True if there is one short correct answer (not a summary).
    """

    metric: str
    new_tokens: int
    prompt: str
    chat: bool = True
    first_line: bool = False
    question: bool = True


DATASETS = {
    "narrativeqa": Dataset(
        "f1",
        128,
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        f"{_STORY}\n\nStory: {{context}}\n\nNow, answer the question based on the story {_STORY}\n\n"
        "Question: {input}\n\nAnswer:",
    ),
    "qasper": Dataset(
        "f1",
        128,
        f"You are given a scientific article and a question. Answer the question {_QASPER}\n\nArticle: {{context}}\n\n "
        f"Answer the question based on the above article {_QASPER}\n\nQuestion: {{input}}\n\nAnswer:",
    ),
    "multifieldqa_en": Dataset(
        "f1",
        64,
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
    ),
    "hotpotqa": Dataset("f1", 32, _SEVERAL),
    "2wikimqa": Dataset("f1", 32, _SEVERAL),
    "musique": Dataset("f1", 32, _SEVERAL),
    "gov_report": Dataset(
        "rouge_l",
        512,
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}"
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        question=False,
    ),
    "qmsum": Dataset(
        "rouge_l",
        512,
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:",
        question=False,
    ),
    "multi_news": Dataset(
        "rouge_l",
        512,
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\nNow, write "
        "a one-page summary of all the news.\n\nSummary:",
        question=False,
    ),
    "trec": Dataset(
        "classification",
        64,
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        chat=False,
        first_line=True,
    ),
    "triviaqa": Dataset(
        "f1",
        32,
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
        chat=False,
        first_line=True,
    ),
    "samsum": Dataset(
        "rouge_l",
        128,
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        chat=False,
        first_line=True,
        question=False,
    ),
    "passage_count": Dataset(
        "count",
        32,
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of "
        "unique paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, "
        "3, and so on.\n\nThe final answer is: ",
    ),
    "passage_retrieval_en": Dataset(
        "retrieval",
        32,
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph "
        'that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer '
        "is: ",
    ),
    "lcc": Dataset(
        "edit_similarity",
        64,
        "Please complete the code given below. \n{context}Next line of code:\n",
        chat=False,
    ),
    "repobench-p": Dataset(
        "edit_similarity",
        64,
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        chat=False,
    ),
}


def available(source: str) -> list[str]:
    """Return the datasets with a file in the folder, or all of them for the Hub."""
    return [name for name in DATASETS if source == HUB or (Path(source) / f"{name}.jsonl").is_file()]


def dataset(name: str, source: str) -> Dataset:
    """Return a dataset's settings, with the prompt and answer length from the folder if it has
    them.

    Raises:
        UserError: a file of them is not a JSON object, or the prompt or length in it is not valid.
    """
    made = DATASETS[name]
    if source == HUB:
        return made
    prompts, lengths = (_json(Path(source) / f"dataset2{what}.json") for what in ("prompt", "maxlen"))
    prompt, new_tokens = prompts.get(name, made.prompt), lengths.get(name, made.new_tokens)
    if not isinstance(prompt, str) or prompt.count("{context}") != 1:
        raise UserError(
            f"dataset2prompt.json in {source} has the prompt {prompt!r:.80} for {name}: write a text with {{context}} "
            "exactly once, and {input} for the question"
        )
    if type(new_tokens) is not int or new_tokens < 1:
        raise UserError(
            f"dataset2maxlen.json in {source} has {new_tokens!r:.80} for {name}: write a whole number from 1"
        )
    return made._replace(prompt=prompt, new_tokens=new_tokens)


def _json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not valid JSON: download it again from THUDM/LongBench") from error
    if not isinstance(read, dict):
        raise UserError(f"{path} is not a JSON object by dataset: download it again from THUDM/LongBench")
    return read


@functools.lru_cache(maxsize=16)
def samples(name: str, source: str) -> tuple[dict[str, Any], ...]:
    """Return a dataset's samples: {input, context, answers, all_classes, _id}.

    Raises:
        UserError: the file is missing or in another layout, or the Hub does not answer.
    """
    where = f"{name} in {source}"
    try:
        text = _from_hub(name) if source == HUB else (Path(source) / f"{name}.jsonl").read_text(encoding="utf-8")
        # No splitlines(), because texts may contain Unicode line separators.
        read = tuple(json.loads(line) for line in text.split("\n") if line.strip())
        for sample in read:
            if not isinstance(sample["context"], str) or not isinstance(sample["input"], str) or not sample["answers"]:
                raise TypeError("context, input or answers")
            whole_characters(json.dumps(sample, ensure_ascii=False))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {where}: {getattr(error, 'strerror', None) or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where} is not in LongBench's layout ({error!r:.80}): download it again") from error
    if not read:
        raise UserError(f"{where} has no samples: download it again")
    return read


def _from_hub(name: str) -> str:
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(REPOSITORY, ARCHIVE, repo_type="dataset", revision=REVISION)
    except Exception as error:  # errors of the library and of its HTTP client
        raise UserError(
            f"cannot download {ARCHIVE} of {REPOSITORY} from the Hub ({str(error).splitlines()[0][:120]}): "
            "download it on another machine, unpack it and give the folder with its .jsonl files as data"
        ) from error
    with zipfile.ZipFile(path) as archive, archive.open(f"data/{name}.jsonl") as file:
        return io.TextIOWrapper(file, encoding="utf-8").read()
