"""Answer questions about a long text that is read once. Each starts from a copy of its cache.
Run `python examples/long_document.py`; `--help` lists the options, --model among them.
It prints the size of the cache beside bfloat16, and each answer; both with their seconds.
"""

import argparse
import copy
import time
from pathlib import Path

import torch

import tersekv
from tersekv.calibration.text import common_ids, input_ids, pydoc_text, question_prompt

QUESTIONS = ["What does the assert statement do?", "What is an asynchronous comprehension?"]


def main(argv=None):
    """Read the text, then ask each question."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", default="smollm2", help="a known name, a folder, a GGUF file or a Hub id")
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--file", type=Path, help="the text; without it the start of Python's language reference")
    parser.add_argument("--new-tokens", type=int, default=60)
    args = parser.parse_args(argv)

    text = args.file.read_text() if args.file else pydoc_text()[:16_000]
    model, tokenizer = tersekv.load_model(args.model, report=print)
    document = common_ids(tokenizer, text, model.config).to(model.device)  # the tokens before any question
    cache = tersekv.CompressedCache(model, args.recipe)
    with tersekv.compress(model, cache), torch.inference_mode():
        start = time.perf_counter()
        model(input_ids=document, past_key_values=cache, logits_to_keep=1)
        print(f"read once in {time.perf_counter() - start:.1f} s: {cache.footprint()}")
        for question in args.questions:
            start = time.perf_counter()
            prompt = question_prompt(tokenizer, text, question)
            ids = input_ids(tokenizer, prompt, model.config, args.new_tokens).to(model.device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=copy.deepcopy(cache),
                max_new_tokens=args.new_tokens,
                do_sample=False,
            )
            answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()
            print(f"\n> {question}\n{answer}\n[{time.perf_counter() - start:.1f} s]")


if __name__ == "__main__":
    main()
