"""Answer prompts of different lengths in one batch, padded on the left, with one packed cache.
Run `python examples/batch.py FILE FILE`; `--help` lists the options, --model among them.
It prints the tokens and the answer of each row, and the size of the cache beside bfloat16.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import tersekv
from tersekv.calibration.text import question_prompt

QUESTION = "Summarise this text in one sentence."


def main(argv=None):
    """Ask the same question about each text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="texts; without them three pages of Python's reference")
    parser.add_argument("--model", default="smollm2", help="a known name, a folder, a GGUF file or a Hub id")
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--new-tokens", type=int, default=40)
    args = parser.parse_args(argv)

    texts = [file.read_text() for file in args.files] or [topics[name] for name in ("assert", "if", "with")]
    model, tokenizer = tersekv.load_model(args.model, report=print)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = [question_prompt(tokenizer, text, QUESTION) for text in texts]
    special = not tokenizer.chat_template  # a chat template has put them into the prompts
    inputs = tokenizer(prompts, add_special_tokens=special, padding=True, padding_side="left", return_tensors="pt")
    inputs = inputs.to(model.device)
    with tersekv.compress(model, args.recipe):
        out = model.generate(**inputs, max_new_tokens=args.new_tokens, do_sample=False, return_dict_in_generate=True)
    answers = out.sequences[:, inputs["input_ids"].shape[1] :]
    for row, answer in enumerate(tokenizer.batch_decode(answers, skip_special_tokens=True)):
        print(f"row {row}, {int(inputs['attention_mask'][row].sum()):,} tokens: {answer.strip()}\n")
    print(f"{len(texts)} rows: {out.past_key_values.footprint()}")


if __name__ == "__main__":
    main()
