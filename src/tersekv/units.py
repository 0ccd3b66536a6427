"""Numbers as people write and read them: 4k tokens, lists with commas, 38.20 MB."""

from __future__ import annotations

import re

from tersekv.errors import UserError

BINARY = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
LONGEST = 1 << 40
"""Longest context that is accepted, in tokens."""


def parse_tokens(text: str, option: str = "a length") -> int:
    """Parse a token count such as 4096, 4k or 1M, where k and M are powers of 1024.

    option: name of the value in the error message.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?)\s*", text, re.IGNORECASE)
    tokens = float(found[1]) * BINARY[found[2].lower()] if found else 0.0
    if not found or tokens < 1 or tokens > LONGEST or tokens != int(tokens):
        raise UserError(
            f"{option} {text.strip()!r} is not a number of tokens: write a whole number from 1 to {LONGEST:,}, like "
            "4096, 4k or 1M"
        )
    return int(tokens)


def parse_lengths(text: str, option: str = "lengths") -> tuple[int, ...]:
    """Parse token counts separated by commas, in order and without duplicates."""
    return tuple(dict.fromkeys(parse_tokens(part, option) for part in text.split(",")))


def parse_numbers(text: str, option: str, least: int, most: int) -> tuple[int, ...]:
    """Parse whole numbers from `least` to `most`, separated by commas, without duplicates."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,12}", part) and least <= int(part) <= most for part in parts):
        raise UserError(
            f"{option} {text!r}: write whole numbers from {least} to {most} separated by commas, like {least},{most}"
        )
    return tuple(dict.fromkeys(int(part) for part in parts))


def parse_bytes(text: str, option: str) -> int:
    """Parse a number of bytes such as 512MB, 1.5GB or 2GiB. Without a unit it must be 10⁶ or more, because a smaller
    number probably lacks its unit.

    option: name of the value in the error message.
    """
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?)\s*(?:([kmgt])(i?))?(b?)", text.strip(), re.IGNORECASE)
    power = " kmgt".index((found[2] or " ").lower()) if found else 0
    size = float(found[1]) * (1024 if found[3] else 1000) ** power if found else 0.0
    if not found or size < (1 if found[2] or found[4] else 1e6):
        between = " " if option.startswith("--") else "="
        raise UserError(
            f"{option}{between}{text.strip()} is not a number of bytes; write for example 512MB, 1.5GB or 2GiB"
        )
    return int(size)


def human_bytes(size: float) -> str:
    """Format bytes in the decimal unit that gives a number below 1,000."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:,.2f} {unit}"
    return f"{size:.0f} B"
