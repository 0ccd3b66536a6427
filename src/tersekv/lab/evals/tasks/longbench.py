"""LongBench v1: sixteen English datasets.

    Answer the question based on the given passages. Only give me the answer and do not output any other words.
    The following are given passages.
    Passage 1: … Passage 10: …
    Answer the question based on the given passages. …
    Question: What occupation is shared by both Marge Piercy and Richard Aldington?
    Answer:                                                       → poet

Source: Bai et al., LongBench (arXiv 2308.14508; THUDM/LongBench, pred.py, eval.py, metrics.py,
config/).

Kept:

- prompts, answer lengths, and prompts cut in the middle;
- metrics: token F1, ROUGE-L, classification, retrieval, count, edit similarity
  (lab/evals/scores.py);
- the best score over the correct answers;
- only the first line counts for trec, triviaqa and samsum; at least one token for samsum;
- a user's turn, except for trec, triviaqa, samsum, lcc and repobench-p.

`accuracy` is the mean over the datasets' means, each by its own metric.

Different:

- A prompt is cut at character positions of its tokens. LongBench decodes it from ids without
  special tokens.
- Prompt, template and longest answer fit into `length`. LongBench cuts the prompt to a number per
  model and adds the template.
- No prompt ends with a space. In LongBench passage_count's, passage_retrieval_en's and samsum's do.
- samsum's answer is cut at the end of its first line. In LongBench the line end is an end token.
- `samples` samples are drawn by the seed if a dataset has more.
- By default the text up to the question is packed before the rest is read (`pack`).

QJL's runner of these tasks swaps the tables of prompts and answer lengths. Its results therefore do
not follow this protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from tersekv.errors import UserError
from tersekv.extras import require
from tersekv.lab.evals import scores
from tersekv.lab.evals.cases import Case, QuestionTask, check_lengths, chosen, mean_of_subtasks, too_short
from tersekv.lab.evals.haystack import middle_cut
from tersekv.lab.evals.longbench_data import DATASETS, HUB, Dataset, available, dataset, samples
from tersekv.lab.evals.prompt import Prompt
from tersekv.lab.evals.tasks.base import Estimate
from tersekv.units import parse_tokens

if TYPE_CHECKING:
    from tersekv.lab.evals.reader import Reader

METRICS = {
    "f1": scores.token_f1,
    "rouge_l": scores.rouge_l,
    "count": scores.share_of_numbers,
    "retrieval": scores.paragraph_number,
    "edit_similarity": scores.edit_similarity,
}


@dataclass(frozen=True)
class LongBench(QuestionTask):
    """LongBench task.

    - samples: maximum number per dataset.
    - length: maximum number of tokens of prompt and answer.
    - subtasks: datasets separated by commas, or all that are available.
    - data: a folder with <dataset>.jsonl, or hub to download the files. The folder may hold its
      own dataset2prompt.json and dataset2maxlen.json.
    """

    length: str = "4k"
    subtasks: str = "all"
    data: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_tokens(self.length, "length")
        chosen(self.subtasks, tuple(DATASETS), "subtasks")

    def cases(self, reader: Reader) -> Iterator[Case]:
        """Yield the samples of each dataset."""
        length = parse_tokens(self.length, "length")
        check_lengths([length], reader)
        for name in self._datasets():
            settings, every = dataset(name, self.data), samples(name, self.data)
            picked = list(range(len(every)))
            if self.samples < len(every):
                picked = sorted(Random(f"{self.seed}-{name}").sample(picked, self.samples))
            for i in picked:
                yield build(reader, name, settings, every[i], i, length)

    def _datasets(self) -> Sequence[str]:
        there = available(self.data) if self.data else []
        wanted = there if self.subtasks == "all" else chosen(self.subtasks, tuple(DATASETS), "subtasks")
        missing = [name for name in wanted if name not in there]
        if missing or not there:
            raise UserError(
                f"data {self.data!r} has no {missing[0] if missing else '<dataset>'}.jsonl: give a folder with "
                f"LongBench's files (the unpacked data.zip of its Hub repository), or data={HUB} to download them"
            )
        if any(DATASETS[name].metric == "edit_similarity" for name in wanted):
            require("LongBench's score of code", "rapidfuzz")
        return wanted

    def score(self, case: Case, text: str) -> dict[str, float]:
        """Return the best score over the answers, as `accuracy` and under the dataset's name."""
        name = case.cell["subtask"]
        settings = DATASETS[name]
        if settings.first_line:
            text = text.lstrip("\n").split("\n")[0]
        if settings.metric == "classification":
            accuracy = max(scores.classification(text, answer, case.data) for answer in case.expected)
        else:
            accuracy = max(METRICS[settings.metric](text, answer) for answer in case.expected)
        return {"accuracy": accuracy, f"accuracy_{name}": accuracy}

    def summarise(self, metrics: Sequence[dict[str, float]], full: Sequence[dict[str, float]]) -> dict[str, Estimate]:
        """Return the means per dataset, and their mean as `accuracy`."""
        return mean_of_subtasks(super().summarise(metrics, full))


def build(reader: Reader, name: str, settings: Dataset, sample: dict[str, Any], index: int, length: int) -> Case:
    """Build a sample, cut in the middle so that it has `length` tokens with its answer."""
    before, after = (part.replace("{input}", sample["input"]) for part in settings.prompt.split("{context}"))
    question = after.rstrip(" ")
    whole = before + sample["context"] + question
    cell = {"subtask": name, "length": length, "metric": settings.metric, "_id": sample.get("_id")}

    def made(tokens: int) -> Case:
        head, tail = middle_cut(reader, whole, tokens)
        asked = question if (tail or head).endswith(question) else tail
        context = (head + tail)[: len(head) + len(tail) - len(asked)]
        return Case(
            f"{name}-{index}",
            Prompt(context, asked, chat=settings.chat),
            tuple(sample["answers"]),
            settings.new_tokens,
            cell,
            single=settings.question,
            min_new_tokens=1 if name == "samsum" else 0,
            data=sample.get("all_classes") or [],
        )

    room = length - settings.new_tokens
    while room > 1:
        case = made(room)
        over = case.tokens(reader) - length
        if over <= 0:
            return case
        room -= over
    raise too_short(name, length)


TASK = LongBench
