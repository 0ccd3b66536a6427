"""Chat about a text. The packed cache keeps earlier turns, so a turn reads only its new tokens.
Run `python examples/chat.py "A question?"`; `--help` lists the options, --model among them.
It prints each answer, the number of new tokens read, and the size of the cache beside bfloat16.
"""

import argparse
from pathlib import Path

import tersekv

LICENSE = Path(__file__).parents[1] / "LICENSE"
QUESTIONS = ["What is this text about?", "At which web address is it?", "What does Licensor mean?"]


def main(argv=None):
    """Ask the questions one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", default="smollm2", help="a known name, a folder, a GGUF file or a Hub id")
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--file", type=Path, default=LICENSE, help="the text to chat about")
    parser.add_argument("--new-tokens", type=int, default=60)
    args = parser.parse_args(argv)

    model, tokenizer = tersekv.load_model(args.model, report=print)
    cache = tersekv.CompressedCache(model, args.recipe)
    messages = []
    with tersekv.compress(model, cache):
        for question in args.questions:
            text = question if messages else f"{args.file.read_text()}\n\n{question}"
            messages.append({"role": "user", "content": text})
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            ).to(model.device)
            ids = inputs["input_ids"]
            # An answer that is tokenized again with the next prompt may have other tokens than the model wrote.
            kept = cache.keep_common(ids)
            out = model.generate(**inputs, past_key_values=cache, max_new_tokens=args.new_tokens, do_sample=False)
            answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()
            messages.append({"role": "assistant", "content": answer})
            print(f"\n> {question}\n{answer}")
            print(f"[read {ids.shape[1] - kept:,} new tokens; the cache holds {cache.footprint()}]")


if __name__ == "__main__":
    main()
