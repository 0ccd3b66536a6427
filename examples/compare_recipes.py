"""Compare recipes on a text of your own: size, and distance from the full cache.
Run `python examples/compare_recipes.py FILE`; `--help` lists the options, --model among them.
It prints the size, KL divergence in nats, agreement of the top token, and perplexity of each.
"""

import argparse

import tersekv
from tersekv.lab.evals.harness import Harness
from tersekv.lab.evals.tasks.divergence import Divergence
from tersekv.units import human_bytes

RECIPES = ["default", "safe", "trellis:bits=2,calibration=prompt", "kivi:bits=4", "kivi:bits=2"]


def main(argv=None):
    """Read the same windows of the text with each recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", default="pydoc", help="a file; without it Python's language reference")
    parser.add_argument("--model", default="smollm2", help="a known name, a folder, a GGUF file or a Hub id")
    parser.add_argument("--recipe", action="append", help=f"may be repeated; without it {', '.join(RECIPES)}")
    parser.add_argument("--packed", type=int, default=1792, help="tokens of a window that are packed first")
    parser.add_argument("--scored", type=int, default=256, help="tokens of a window that are then scored")
    parser.add_argument("--windows", type=int, default=2, help="windows from the start of the text; 0 for all")
    args = parser.parse_args(argv)

    model, tokenizer = tersekv.load_model(args.model, report=print)
    task = Divergence(text=args.text, context=args.packed + args.scored, prefix=args.packed, windows=args.windows)
    harness = Harness(model, tokenizer, args.model, args.recipe or RECIPES)
    print(task.about())
    print(f"{'recipe':36}{'size':>10}{'of bf16':>9}{'KL':>9}{'same top':>10}{'perplexity':>12}")
    for row in harness.run({"divergence": task}):
        full = row.recipe == "full"
        name = f"full, {model.dtype}" if full else tersekv.Recipe.parse(row.recipe).name
        found = row.metrics
        print(
            f"{name:36}{human_bytes(row.bytes):>10}{row.bits_per_element / 16:>9.1%}{found['kl'].mean:>9.4f}"
            f"{found['top1_agreement'].mean:>9.1%}{found['perplexity'].mean:>12.2f}"
        )


if __name__ == "__main__":
    main()
