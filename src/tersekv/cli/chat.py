"""`tersekv chat`: several turns with a model over one packed cache."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tersekv.cli import output
from tersekv.cli.files import check_out
from tersekv.cli.generate import (
    Dtype,
    PrefillChunk,
    check_temperature,
    checked_dtype,
    chunk_of,
    load,
    read_text,
    use_threads,
)
from tersekv.errors import CacheError, UserError

if TYPE_CHECKING:
    from tersekv.serving.local.answers import Sampling, Stop

HELP = """/size        recipe, tokens and bytes of the packed cache
/save FILE   write the cache to a file
/load FILE   go on from such a file, or from one of `tersekv prompt-cache build`
/reset       start over
/quit        leave (or Ctrl-D); Ctrl-C stops an answer"""


def chat(
    model: Annotated[str, typer.Argument(help=output.MODEL_HELP)] = "smollm2",
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help=output.RECIPE_HELP, show_default=output.DEFAULT_RECIPE)
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Text to talk about; it precedes the first question.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option("--load", help="Go on from a file of /save or `tersekv prompt-cache build`.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="Instruction for the whole chat.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of sampling.")] = 0,
    dtype: Dtype = "auto",
    prefill_chunk: PrefillChunk = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of CPU threads.")] = None,
    calibration: output.Calibrations = None,
) -> None:
    """Chat with a model. All turns share one packed cache, so each reads only its own new tokens.

    The prompt line shows the size of the cache. /help lists the commands. Questions can be piped in, too.
    """
    check_temperature(temperature)
    checked_dtype(dtype)
    chunk = chunk_of(prefill_chunk)
    packed = cache is not None and not holds_any_recipe(cache)
    if cache is not None and (system or (recipe and packed)):
        what, options = ("recipe and the instruction", "-r and --system") if packed else ("instruction", "--system")
        raise UserError(f"--load goes on with the {what} of the file: leave {options} out")
    document = None if file is None else read_text(None, file, None)
    with output.step("loading torch and transformers"):
        import torch

        from tersekv.calibration.find import calibration_for
        from tersekv.recipe import Recipe
        from tersekv.serving.local.answers import Sampling

        use_threads(threads)
        parsed = Recipe.parse(recipe or output.DEFAULT_RECIPE)
    network, tokenizer = load(model, dtype)
    with output.step("looking for the calibration"):
        learnt = None if packed else calibration_for(network, parsed, calibration)
    torch.manual_seed(seed)
    sampling = Sampling(max_new_tokens, temperature, prefill_chunk=chunk)
    talk = Chat(network, tokenizer, parsed, learnt, sampling, system)
    if cache is not None:
        talk.load(str(cache))
    talk.document = talk.unread = document
    if sys.stdin.isatty():
        output.show(f"{model}, {talk.cache.recipe.name}. /help lists the commands.")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # lets `input` edit lines
    for line in _lines(talk.status):
        if line == "/quit":
            break
        try:
            talk.take(line)
        except (UserError, CacheError) as error:
            print(f"tersekv: {error}", file=sys.stderr)


def _lines(status: Callable[[], str]) -> Iterator[str]:
    """Yield lines that are not empty, until the end of the input. Ctrl-C leaves the present line."""
    while True:
        try:
            line = input(status() if sys.stdin.isatty() else "").strip()
        except EOFError:
            if sys.stdin.isatty():
                output.show("")
            return
        except KeyboardInterrupt:
            output.show("\n/quit or Ctrl-D leaves.")
            continue
        except UnicodeDecodeError as error:
            raise UserError("standard input is not UTF-8 text: convert it first") from error
        if line:
            yield line


class Chat:
    """One conversation with a model.

    document: text that precedes the first question. unread: the same until that question is answered.
    """

    def __init__(
        self, model: Any, tokenizer: Any, recipe: Any, calibration: Any, sampling: Sampling, system: str | None
    ) -> None:
        import tersekv
        from tersekv.cli.turns import Turns

        self._model, self._tokenizer, self._sampling = model, tokenizer, sampling
        self._new_turns = lambda: Turns(tokenizer, system)
        self._packed_with = recipe, calibration
        self.turns, self.cache = self._new_turns(), tersekv.CompressedCache(model.config, recipe, calibration)
        self.document: str | None = None
        self.unread: str | None = None

    def status(self) -> str:
        """Return the prompt line, with the size of the cache."""
        held = self.cache.footprint()
        return f"[{held.tokens:,} tokens, {output.human_bytes(held.total_bytes)}] > "

    def take(self, line: str) -> None:
        """Answer a question, or follow a command."""
        if not line.startswith("/"):
            return self.ask(line)
        name, _, rest = line[1:].partition(" ")
        commands: dict[str, Callable[[], None]] = {
            "help": lambda: output.show(HELP),
            "size": lambda: output.show(repr(self.cache)),
            "reset": self.reset,
        }
        files: dict[str, Callable[[str], None]] = {"save": self.save, "load": self.load}
        if name in files:
            if not rest.strip():
                raise UserError(f"/{name} needs a file: /{name} FILE")
            return files[name](rest.strip())
        if name not in commands:
            raise UserError(f"/{name} is not a command; /help lists them")
        return commands[name]()

    def ask(self, question: str) -> None:
        """Answer a question and add both to the conversation. Ctrl-C stops the answer."""
        import tersekv
        from tersekv.cli import measure
        from tersekv.models.config import longest_context
        from tersekv.serving.local.answers import Stop, Stopped, answer

        asked = question if self.unread is None else f"{self.unread}\n\n{question}"
        ids = self.turns.prompt(asked).to(self._model.device)
        longest = longest_context(self._model.config)
        if longest and ids.shape[1] + self._sampling.max_tokens > longest:
            raise UserError(
                f"the chat has {ids.shape[1]:,} tokens with this question, and the answer may have "
                f"{self._sampling.max_tokens:,}, but this model's context is {longest:,}: /reset starts over"
            )
        stop, passes = Stop(), self._sampling.passes(ids.shape[1] - self.cache.get_seq_length())
        with (
            tersekv.compress(self._model, self.cache),
            measure.prefill_progress(self._model, passes=passes) as read,
            _ctrl_c(stop),
        ):

            def write(text: str) -> None:
                read()
                output.stream(text)

            try:
                given = answer(self._model, self._tokenizer, self.cache, ids, self._sampling, write, stop)
                new = given.ids[:-1] if given.ended else given.ids
            except Stopped as stopped:
                new = stopped.ids
                read()  # before a line is written, because the progress erases its own lines
                output.stream(" [stopped]" if new else "[stopped before the answer; the question is left out]")
        output.stream("\n")
        if new or not stop.is_set():
            self.turns.ids, self.unread = [*ids[0].tolist(), *new], None
        elif self.cache.get_seq_length() > len(self.turns.ids):  # chunks of the question were read
            self.cache.keep_common(ids[:, : max(1, len(self.turns.ids))])

    def reset(self) -> None:
        """Start over, with an empty cache of the same recipe."""
        self.cache, self.turns = self.cache.empty(self._model.config), self._new_turns()
        self.unread = self.document

    def save(self, path: str) -> None:
        """Write the cache and its token ids to a file."""
        import torch

        where = check_out(Path(path), option="/save")
        self.cache.save(where, torch.tensor([self.turns.ids[: self.cache.get_seq_length()]]), self._model)
        output.show(f"{where}: {output.human_bytes(where.stat().st_size)}")

    def load(self, path: str) -> None:
        """Go on from a file."""
        import tersekv

        recipe, calibration = self._packed_with if holds_any_recipe(Path(path)) else (None, None)
        with output.step(f"loading {path}"):
            cache = tersekv.CompressedCache.load(path, self._model, recipe=recipe, calibration=calibration)
        held = cache.token_ids.joined()
        if held is None or len(held) > 1:
            raise UserError(
                f"{path} was saved without token ids, or is a batch: /save and prompt-cache build keep them"
            )
        self.cache, self.turns = cache, self._new_turns()
        self.turns.ids, self.unread = held[0].tolist(), None
        output.show(f"{path}: {cache!r}")


def holds_any_recipe(path: Path) -> bool:
    """Return True if a file loads into a cache of any recipe. Raise UserError if it holds no cache."""
    from tersekv.cache.tensor_file import read_said

    return "storage" in read_said(path.expanduser())[0]


@contextlib.contextmanager
def _ctrl_c(stop: Stop) -> Iterator[None]:
    """Let Ctrl-C set `stop`, so that the cache is not left in the middle of a change."""
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
