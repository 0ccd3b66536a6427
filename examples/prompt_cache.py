"""Read a text once and save its packed cache as a file. Later runs load the file and ask again.
Run `python examples/prompt_cache.py` twice; `--help` lists the options, --model among them.
It prints the seconds of reading and loading, the size beside bfloat16, and the answer.
"""

import argparse
import time
from pathlib import Path

import torch

import tersekv
from tersekv.calibration.text import common_ids, input_ids, question_prompt

LICENSE = Path(__file__).parents[1] / "LICENSE"


def main(argv=None):
    """Write the file where it is missing, then load it and ask."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a known name, a folder, a GGUF file or a Hub id")
    parser.add_argument("--recipe", default="default", help="of a file that is written")
    parser.add_argument("--file", type=Path, default=LICENSE)
    parser.add_argument("--cache", type=Path, default=Path("prompt.cache"), help="the file to write or load")
    parser.add_argument("--question", default="At which web address is the license?")
    parser.add_argument("--new-tokens", type=int, default=60)
    args = parser.parse_args(argv)

    text = args.file.read_text()
    model, tokenizer = tersekv.load_model(args.model, report=print)
    if not args.cache.exists():
        start = time.perf_counter()
        ids = common_ids(tokenizer, text, model.config).to(model.device)  # the tokens before any question
        cache = tersekv.CompressedCache(model, args.recipe)
        with tersekv.compress(model, cache), torch.inference_mode():
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        cache.save(args.cache, ids)
        print(f"read and saved in {time.perf_counter() - start:.1f} s: {args.cache}")

    prompt = question_prompt(tokenizer, text, args.question)
    ids = input_ids(tokenizer, prompt, model.config, args.new_tokens).to(model.device)
    start = time.perf_counter()
    # An error names the place where the prompt differs from the tokens in the file.
    cache = tersekv.CompressedCache.load(args.cache, model, ids, tokenizer.decode)
    print(f"loaded in {time.perf_counter() - start:.2f} s: {cache}")
    with tersekv.compress(model, cache):
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=args.new_tokens,
            do_sample=False,
        )
    answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()
    print(f"\n> {args.question}\n{answer}")


if __name__ == "__main__":
    main()
