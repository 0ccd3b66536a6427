"""Add a codec of your own: 4-bit mu-law codes, as in digital telephony, with a scale per group.
Run `python examples/own_codec.py`; `--help` lists the options, --model among them.
It prints the answer, the bits per element of the codec, and the size beside bfloat16.
"""

import argparse
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

import tersekv
from tersekv.calibration.text import input_ids, question_prompt
from tersekv.codecs import Codec, TableBytes
from tersekv.layouts.grid import Grid, GridView


@lru_cache
def levels(mu):
    u = torch.linspace(-1, 1, 16)
    return u.sign() * ((1 + mu) ** u.abs() - 1) / mu


@dataclass(frozen=True)
class MuLaw(Codec):
    mu: float = 8.0  # an option of the recipe

    def grid(self, head_dim):
        return Grid(bits=4, side=self.side, axis="token", group=32, affine=False, head_dim=head_dim)

    def layout(self, head_dim):  # the tensors of a block of tokens
        return self.grid(head_dim).layout()

    def encode(self, x):  # float32 [batch, heads, tokens, head dim]
        grid = self.grid(x.shape[-1])
        scale = grid.groups(x).abs().amax(-1).half()
        return grid.encode(x, levels(self.mu).to(x.device), scale, None)

    def view(self, planes, head_dim):  # what attention reads
        return GridView(self.grid(head_dim), planes, levels(self.mu).to(planes["codes"].device))

    def table_bytes(self, head_dim):  # counted in the size
        return TableBytes({f"mu-law {self.mu}": 4 * 16})

    def tables(self, head_dim):
        return [levels(self.mu)]


tersekv.register_codec("mulaw", MuLaw)


def main(argv=None):
    """Answer one question about a text with the new codec."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a known name, a folder, a GGUF file or a Hub id")
    parser.add_argument("--recipe", default="mulaw")
    parser.add_argument("--file", type=Path, default=Path(__file__).parents[1] / "LICENSE")
    parser.add_argument("--new-tokens", type=int, default=60)
    args = parser.parse_args(argv)

    model, tokenizer = tersekv.load_model(args.model, report=print)
    prompt = question_prompt(tokenizer, args.file.read_text(), "At which web address is the license?")
    ids = input_ids(tokenizer, prompt, model.config, args.new_tokens).to(model.device)
    with tersekv.compress(model, args.recipe):
        out = model.generate(ids, max_new_tokens=args.new_tokens, do_sample=False, return_dict_in_generate=True)
    print(tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True).strip())
    print(f"{MuLaw().true_bits(128):.2f} bits per element at head dim 128; {out.past_key_values}")


if __name__ == "__main__":
    main()
