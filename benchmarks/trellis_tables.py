"""Ablation of the codec `trellis`, and comparison with every other method at its bits: tables from
records.

    python benchmarks/trellis_tables.py --train train.txt --other c4.txt --test test.txt --out folder    # all; hours
    python benchmarks/trellis_tables.py … --tables keys,values --windows 2                               # some
    python benchmarks/trellis_tables.py … --print                                         # from existing records

Each evaluation is one forward pass in which attention sees every key and value quantised
(`simulate`), with four exact sinks. The texts are wikitext-2's train rows for fitting, another
corpus for comparison, and wikitext-2's test rows, joined by two newlines.
"""

from __future__ import annotations

from ablation import Row, Setting, Study

FITTED = Setting(sinks=4)
OTHER = Setting(sinks=4, text="other")
RATES = ("1.5", "2.1", "2.6", "3.1", "3.6", "4.1")
STEPS = (
    ("rotation and scalar codes", "allot=layer,basis=rotation,centre=false,code=scalar,metric=none"),
    ("… centred", "allot=layer,basis=rotation,code=scalar,metric=none"),
    ("… and the channels' own basis, bits water-filled", "allot=layer,basis=channels,code=scalar,metric=none"),
    ("… and the KLT's", "allot=layer,code=scalar,metric=none"),
    ("… in the metric of the loss", "allot=layer,code=scalar"),
    ("… and trellis codes", "allot=layer"),
    ("… and bits allocated over layers and sides: all", ""),
    ("all, without centring", "centre=false"),
    ("all, without the metric", "metric=none"),
    ("all, in the channels' own basis", "basis=channels"),
    ("all, in a random basis", "basis=rotation"),
)
OTHERS = (
    *(f"turboquant:bits={b}" for b in ("2", "2.5", "3", "3.5", "4")),
    *(f"kivi:bits={b}" for b in (2, 3, 4)),
    "polarquant",
    "qjl",
    *(f"kvquant:bits={b}" for b in (2, 3, 4)),
)


def trellis(bits: str, options: str) -> str:
    """Return a recipe's trellis part."""
    return f"trellis:bits={bits}" + (f",{options}" if options else "")


def tables() -> dict[str, tuple[str, list[Row]]]:
    """Return every table by name."""
    made = {}
    for side, recipe in (("keys", "{0}/exact:dtype=fp32"), ("values", "exact:dtype=fp32/{0}"), ("both", "{0}")):
        made[side] = (
            f"Ingredients, {side}" + ("" if side == "both" else " alone"),
            [Row(f"{b} bits: {label}", recipe.format(trellis(b, o)), FITTED) for b in ("2", "3") for label, o in STEPS],
        )
    made["rope"] = (
        "Keys decorrelated after and before RoPE",
        [Row(f"{b} bits, {w} RoPE", trellis(b, o), FITTED) for b in ("2", "3") for w, o in ORDER],
    )
    made["rates"] = ("Bits", [Row(f"{b} bits", trellis(b, ""), FITTED) for b in RATES])
    made["fits"] = (
        "Calibration data",
        [
            row
            for b in ("2", "3")
            for row in (
                Row(f"{b} bits, wikitext-2 train", trellis(b, ""), FITTED),
                Row(f"{b} bits, another corpus", trellis(b, ""), OTHER),
                Row(f"{b} bits, the prompt", trellis(b, "calibration=prompt"), FITTED),
            )
        ],
    )
    made["others"] = ("Other methods", [Row(f"`{recipe}`", recipe, FITTED) for recipe in OTHERS])
    return made


ORDER = (("after", ""), ("before", "pre_rope=true"))
NOTES = {
    "keys": "Values stay float32; true bits are of keys and values together.",
    "values": "Keys stay float32; true bits are of keys and values together.",
    "both": "",
    "rope": "Before RoPE the query cannot absorb the basis, so no kernel reads this variant.",
    "rates": "",
    "fits": "A fit on the prompt has no gradients; means, bases and scales are those of this sequence only.",
    "others": "",
}


if __name__ == "__main__":
    Study(tables(), NOTES, "divergence").main(__doc__)
