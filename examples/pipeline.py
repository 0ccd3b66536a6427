"""Use transformers' text-generation pipeline with a packed cache. The pipeline stays as it is.
Run `python examples/pipeline.py`; `--help` lists the options, --model among them.
It prints the answer and the size of the cache beside bfloat16.
"""

import argparse
from pathlib import Path

import transformers

import tersekv

LICENSE = Path(__file__).parents[1] / "LICENSE"


def main(argv=None):
    """Answer one question about a text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a known name, a folder, a GGUF file or a Hub id")
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--file", type=Path, default=LICENSE)
    parser.add_argument("--question", default="At which web address is the license?")
    parser.add_argument("--new-tokens", type=int, default=60)
    args = parser.parse_args(argv)

    model, tokenizer = tersekv.load_model(args.model, report=print)
    generator = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompt = f"{args.file.read_text()}\n\n{args.question}"
    messages = [{"role": "user", "content": prompt}] if tokenizer.chat_template else prompt
    cache = tersekv.CompressedCache(model, args.recipe)  # optional: passed to print its size
    with tersekv.compress(model, cache):
        out = generator(
            messages,
            past_key_values=cache,
            max_new_tokens=args.new_tokens,
            do_sample=False,
            return_full_text=False,
        )
    print(out[0]["generated_text"].strip())
    print(cache)


if __name__ == "__main__":
    main()
