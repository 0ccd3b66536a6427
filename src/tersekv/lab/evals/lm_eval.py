"""Model type `tersekv` for lm-evaluation-harness (0.4.13 and later): runs its tasks over a packed
cache.

The harness only knows models whose module was imported. Either start its program here,

    python -m tersekv.lab.evals.lm_eval run --model tersekv --model_args pretrained=smollm2,recipe=kivi:bits=4 --tasks …

or run `import tersekv.lab.evals.lm_eval` before `lm_eval.simple_evaluate(model="tersekv", …)`. The
model takes the arguments of the harness's `hf` and two more:

    recipe   how the cache is packed; `full` for transformers' own. A recipe with commas needs JSON arguments:
             --model_args '{"pretrained": "smollm2", "recipe": "kivi:bits=2,group=64"}'
    chunk    tokens of a continuation read per pass (128), so that long ones are also read over packed tokens

The context except its last token is packed after one exact prefill. That token and everything after
it are read over the packed cache, so that even a single-token answer depends on it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import torch

from tersekv.errors import UserError
from tersekv.hf.compress import compress
from tersekv.hf.prefill import new_cache
from tersekv.lab.evals.decoding import loglikelihood
from tersekv.lab.evals.reader import FULL
from tersekv.models import loading
from tersekv.recipe import Recipe
from tersekv.versions import cache_argument

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from tqdm import tqdm
except ImportError as error:
    missing = f"lm-evaluation-harness is not installed ({error}): pip install 'lm_eval[hf]>=0.4.13'"
    if __name__ == "__main__":
        raise SystemExit(f"tersekv: {missing}") from error
    raise ImportError(missing, name=error.name) from error

Request = tuple[Any, list[int], list[int]]


@register_model("tersekv")
class TersekvLM(HFLM):
    """The harness's Hugging Face model with a packed cache.

    Raises:
        UserError: an unknown recipe, or one that does not support the model.
    """

    def __init__(self, pretrained: Any, recipe: str = "default", chunk: int = 128, **kwargs: Any) -> None:
        if int(chunk) < 1:
            raise UserError(f"chunk={chunk} is too small; give 1 or more")
        self.chunk = int(chunk)
        self.recipe = None if recipe == FULL else str(Recipe.parse(recipe))
        if isinstance(pretrained, str):
            pretrained = loading.prepare(pretrained)
        super().__init__(pretrained, **kwargs)
        new_cache(self.model, self.recipe)  # raises if the recipe does not support the model

    def _reading(self) -> Any:
        return nullcontext() if self.recipe is None else compress(self.model, self.recipe)

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each request, and True if greedy decoding gives its tokens.

        Equal contexts are read once.
        """
        answers: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(requests)), key=lambda i: requests[i][1])
        with self._reading(), tqdm(total=len(requests), disable=disable_tqdm, desc="log-likelihoods") as bar:
            for _, same in groupby(order, key=lambda i: requests[i][1]):
                members = list(same)
                longest = max(len(requests[i][2]) for i in members)
                context = requests[members[0]][1][-max(1, self.max_length + 1 - longest) :]
                cache = self._packed(torch.tensor([context[:-1]], device=self.device))
                for i in members:
                    name, _, following = requests[i]
                    used = cache if i == members[-1] else copy.deepcopy(cache)
                    answers[i] = loglikelihood(self.model, used, context[-1], following, self.chunk)
                    bar.update()
                    if name is not None:
                        self.cache_hook.add_partial("loglikelihood", name, answers[i])
        return [answers[i] for i in range(len(requests))]

    def _packed(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        """Return a cache that has read ids [B, T]. mask [B, T] is 0 at padding."""
        cache = new_cache(self.model, self.recipe)
        if ids.shape[1]:
            padded: dict[str, Any] = {} if mask is None else {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
            self.model(
                input_ids=ids, attention_mask=mask, use_cache=True, **padded, **cache_argument(self.model, cache)
            )
        return cache

    @torch.no_grad()
    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        """Continue context [B, T], padded on the left, over a cache that has packed all but its
        last token."""
        mask = kwargs.get("attention_mask")
        with self._reading():
            cache = self._packed(context[:, :-1], None if mask is None else mask[:, :-1])
            return super()._model_generate(context, max_length, stop, **cache_argument(self.model, cache), **kwargs)


def main() -> None:
    """Run the harness's own program with the model type `tersekv`."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        raise SystemExit(f"tersekv: {error}") from error


if __name__ == "__main__":
    main()
