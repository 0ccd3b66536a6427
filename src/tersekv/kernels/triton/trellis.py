"""Loaders of `trellis` (`layouts/trellis.py`) and the search for its codes (`kernels/trellis_search.py`).

Loaders read any component by itself: two words of its token's ring, and a codebook. The bits of a
component depend on the head, so the position of its window is computed once for all tokens of a
tile. Scales of components are multiplied with the query and the sums, gains of tokens with the
scores and the weights.

The search is Viterbi over 256 states, for any number of bits. A component of b bits is b rounds of
one bit. In a round, states 2i and 2i + 1 lead to i and i + 128, and the cheaper one passes on its
cost. After the last round the component's error is added. A round stores 128 bits, one per pair of
states: the choice. The trace back reads one of them. Costs are the reference's integers, so codes
are equal.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from tersekv.kernels.triton.encode_kernels import ROUNDER
from tersekv.kernels.triton.leaves import BLOCK, CHANNELS, PADDED, STREAM_WORDS
from tersekv.kernels.triton.tiles import INTERPRETED, head_at, inverse, largest, once, product, stored_at, tokens_at

# Fields of a leaf: stream and gains with strides of batch row, head and block; bits and scales with
# strides of batch row, head and component; tables.
STREAM: tl.constexpr = tl.constexpr(0)
GAIN: tl.constexpr = tl.constexpr(4)
BITS: tl.constexpr = tl.constexpr(8)
SCALE: tl.constexpr = tl.constexpr(12)
TABLES: tl.constexpr = tl.constexpr(16)
STATES: tl.constexpr = tl.constexpr(256)
"""States of the trellis: windows of 8 bits."""
GATHER: tl.constexpr = tl.constexpr(
    "{ .reg .b64 a; .reg .b32 p; .reg .b16 l, h; "
    "prmt.b32 p, $1, $2, 0x5410; shr.b32 p, p, $3; lop3.b32 p, p, 510, $5, 0xEA; mov.b64 a, {p, $7}; "
    "ld.global.nc.b16 l, [a]; "
    "prmt.b32 p, $1, $2, 0x7632; shr.b32 p, p, $4; lop3.b32 p, p, 510, $6, 0xEA; mov.b64 a, {p, $8}; "
    "ld.global.nc.b16 h, [a]; mov.b32 $0, {l, h}; }"
)
"""PTX that loads the entries of two tokens from a table of float16, see `tiles.py`. Twice a window is its place in
bytes. The table is at a multiple of its size (`tables.py`), so that a place is or-ed to the low half of its address."""
UNIT_GAIN: tl.constexpr = tl.constexpr(144)
GAIN_STEPS: tl.constexpr = tl.constexpr(16)
GAIN_ROOM: tl.constexpr = tl.constexpr(4.0)
"""Divisor of gains, which are below 2^7. Weights are at most 2^10, so that their products fit float16."""


@triton.jit
def _gains(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Gains of tokens, float32 [N]."""
    i = tl.arange(0, N)
    code = tl.load(tokens_at(leaf, GAIN, b, h, n0, i, S, LEAF), mask=n0 + i < T, other=0).to(tl.float32)
    return tl.where(code > 0, tl.exp2((code - UNIT_GAIN) / GAIN_STEPS), 0.0)


@triton.jit
def _scales(leaf, b, h, S: tl.constexpr, LEAF: tl.constexpr):
    """Scales of components, float32 [channels]."""
    c = tl.arange(0, S[LEAF][PADDED])
    return tl.load(head_at(leaf, SCALE, b, h) + c, mask=c < S[LEAF][CHANNELS], other=0.0)


@triton.jit
def _entries(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Load the table entries of tokens, float16 [N, channels]. Tokens and channels that do not exist have any entry;
    their gains and scales are 0."""
    K: tl.constexpr = S[LEAF][PADDED]
    WORDS: tl.constexpr = S[LEAF][STREAM_WORDS]
    if WORDS == 0:
        return tl.zeros((N, K), tl.float16)
    else:
        c = tl.arange(0, K)
        inside = c < S[LEAF][CHANNELS]
        bits = tl.load(head_at(leaf, BITS, b, h) + c, mask=inside, other=0).to(tl.int32)
        before = (tl.cumsum(bits, 0) + (16 * WORDS - 9)) % (16 * WORDS)  # place of the bit before a window
        low = before >> 4
        high = (low + 1) % WORDS
        i = tl.arange(0, N)[:, None]
        words = stored_at(leaf, STREAM, b, h, n0, i, T, S, LEAF)
        first = tl.load(words + low[None, :] * S[LEAF][BLOCK])
        second = tl.load(words + high[None, :] * S[LEAF][BLOCK])
        shift, row = (before & 15)[None, :], (bits * (2 * STATES))[None, :]
        if INTERPRETED or not is_cuda():
            pair = (first.to(tl.int32) & 0xFFFF) | (second.to(tl.int32) << 16)
            return tl.load(leaf[TABLES] + ((((pair >> shift) & (2 * STATES - 2)) | row) >> 1))
        else:
            table = leaf[TABLES].to(tl.int64)
            row |= table.to(tl.int32)
            high = (table >> 32).to(tl.int32)
            return tl.inline_asm_elementwise(
                GATHER, "=r,r,r,r,r,r,r,r,r", [first, second, shift, row, high], tl.float16, True, 2
            )


@triton.jit
def decode_trellis(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Decode to x̂, float32 [N, channels]."""
    x = _entries(leaf, b, h, n0, T, S, LEAF, N).to(tl.float32) * _scales(leaf, b, h, S, LEAF)[None, :]
    return x * _gains(leaf, b, h, n0, T, S, LEAF, N)[:, None]


@triton.jit
def load_keys_trellis(leaf, q, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Scores [N, rows] of q float32 [channels, rows]."""
    x, scales = _entries(leaf, b, h, n0, T, S, LEAF, N), _scales(leaf, b, h, S, LEAF)
    gains = _gains(leaf, b, h, n0, T, S, LEAF, N)
    q *= scales[:, None]
    most = largest(q)
    return trellis_scores((x, gains, most), q * inverse(most))


@triton.jit
def load_values_trellis(leaf, p, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Σ p·v̂ [channels, rows] of weights p float32 [N, rows]."""
    x, scales = _entries(leaf, b, h, n0, T, S, LEAF, N), _scales(leaf, b, h, S, LEAF)
    return trellis_sums((x, _gains(leaf, b, h, n0, T, S, LEAF, N), scales[:, None]), p)


@triton.jit
def load_latent_trellis(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Load vectors that are keys and values: float16 [N, channels], gains of tokens, and the power of two that divides
    all."""
    scales = _scales(leaf, b, h, S, LEAF)
    most = largest(scales)
    x = _entries(leaf, b, h, n0, T, S, LEAF, N) * (scales * inverse(most)).to(tl.float16)[None, :]
    return once(x), _gains(leaf, b, h, n0, T, S, LEAF, N), most


@triton.jit
def trellis_scores(loaded, q):
    """Scores [N, rows] of q float32 [channels, rows]."""
    x, gains, most = loaded
    return product(x, q.to(tl.float16)) * (gains * most)[:, None]


@triton.jit
def trellis_sums(loaded, p):
    """Σ p·v̂ [channels, rows] of weights p float32 [N, rows]."""
    x, gains, most = loaded
    weights = p * (gains * (1.0 / GAIN_ROOM))[:, None]
    return product(tl.trans(x), weights.to(tl.float16)) * (most * GAIN_ROOM)


# Constants of `kernels/trellis.py` and `kernels/trellis_search.py`.
LARGEST: tl.constexpr = tl.constexpr(32767)
MOST_COST: tl.constexpr = tl.constexpr(65535)
RENORMALISE: tl.constexpr = tl.constexpr(16)
BINS: tl.constexpr = tl.constexpr(63)
LEAST_NEAR: tl.constexpr = tl.constexpr(3)
LEAST_FACTOR: tl.constexpr = tl.constexpr(2048)
STATE_BITS: tl.constexpr = tl.constexpr(8)
RATES: tl.constexpr = tl.constexpr(9)
ROUND_BYTES: tl.constexpr = tl.constexpr(16)
"""Bytes that a round stores: 128 bits."""


@triton.jit
def _halved(cost, VECTORS: tl.constexpr):
    """Compute one round: costs [VECTORS, 256], and a bit for each pair of states whose odd one was
    cheaper, as bytes [VECTORS, 16]."""
    even, odd = tl.split(tl.reshape(cost, (VECTORS, STATES // 2, 2)))
    least = tl.where(odd < even, odd, even)
    bit = tl.reshape((odd < even).to(tl.int32), (VECTORS, ROUND_BYTES, 8)) << tl.arange(0, 8)[None, None, :]
    cost = tl.reshape(tl.permute(tl.join(least, least), (0, 2, 1)), (VECTORS, STATES))
    return cost, tl.sum(bit, axis=2).to(tl.uint8)


@triton.jit
def _due(least, enough, vector, ok):
    """True if the error of any vector of a program is not below `enough`."""
    error = tl.load(least + vector, mask=ok, other=0.0)
    return tl.max((ok & (error >= tl.load(enough + vector, mask=ok, other=1.0))).to(tl.int32), axis=0) > 0


@triton.jit
def _bits_from(bits, step, D):
    """Return the bits of the first component from `step` on around the ring that has any. bits: of a row."""
    found = step * 0
    for i in range(D):
        d = step + i
        d = tl.where(d < D, d, d - D)
        found = tl.where(found == 0, tl.load(bits + tl.where(d < D, d, d - D)).to(tl.int32), found)
    return found


@triton.jit
def _allowed(cost, near, before, after, bin):
    """Raise the costs of states that a component of `before` bits may not enter before one of `after` bits."""
    at = near + ((before * RATES + after) * (2 * BINS + 1) + bin[:, None]) * STATES + tl.arange(0, STATES)[None, :]
    return tl.where(tl.load(at) > 0, cost, MOST_COST + 1)


@triton.jit
def search(
    taken, ends, y, factor, bits, entries, near, place, stop, least, enough, n, D, rounds, CLOSED: tl.constexpr,
    SOME: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """Forward pass of the search. Grid (tiles of vectors, R).

    y int32 [R, n, D] in units of costs, factor int16 and bits uint8 [R, D], entries int16 [9, 256], near
    uint8 [9, 9, 2·BINS + 1, 256] by `near_entries`, all ones where it allows every entry.
    The first Σ bits rounds of a row are written to taken uint8 [R, n, rounds, 16].

    place and stop int32 [R] are those of `first_search`. CLOSED: paths begin in the states `ends`
    int32 [R, n] and go around the ring from `place` back to the same group. Else they begin in any state at
    component 0 and end before `stop`, and their rounds from `place` on are written. The best path's last
    state is written to `ends`.

    SOME: programs none of whose vectors has an error least ≥ enough, both float32 [R, n], search
    nothing.
    """
    row = tl.program_id(1).to(tl.int64)
    v = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    vector = row * n + v
    state = tl.arange(0, STATES)
    cost = tl.zeros((VECTORS, STATES), tl.int32)
    begin = tl.load(place + row)
    first = begin * 0
    last = tl.load(stop + row)
    if CLOSED:
        end = tl.load(ends + vector, mask=v < n, other=0)
        cost = tl.where(state[None, :] == end[:, None], 0, MOST_COST)
        first = begin
        last = begin + D
    if SOME:
        last = tl.where(_due(least, enough, vector, v < n), last, first)
    to = taken + (vector * rounds * ROUND_BYTES)[:, None] + tl.arange(0, ROUND_BYTES)[None, :]
    steps = 0
    brought = 0
    before = begin * 0  # bits of the component before, if it may take near entries only
    bin = tl.zeros((VECTORS,), tl.int32)
    for step in range(first, last):
        d = tl.where(step < D, step, step - D)
        width = tl.load(bits + row * D + d).to(tl.int32)
        if (before > 0) & (width > 0):
            cost = _allowed(cost, near, before, width, bin)
        for _ in range(width):
            cost, odd = _halved(cost, VECTORS)
            tl.store(to, odd, mask=(v < n)[:, None] & (step >= begin))
            to += tl.where(step >= begin, ROUND_BYTES, 0)
        due = (width > 0) & (steps > 0) & (steps % RENORMALISE == 0)
        cost -= tl.where(due, tl.min(cost, axis=1), 0)[:, None]
        steps += tl.where(width > 0, 1, 0)
        own = tl.load(factor + row * D + d).to(tl.int32)
        off = (tl.load(entries + width * STATES + state).to(tl.int32) * own + (1 << 14)) >> 15
        own_y = tl.load(y + vector * D + d, mask=v < n, other=0)
        off = off[None, :] - own_y[:, None]
        if width > 0:
            per_bin = tl.div_rn(own * 0.0 + BINS, tl.maximum(own, 1).to(tl.float32))
            exact = tl.minimum(tl.maximum(own_y.to(tl.float32) * per_bin, -BINS), BINS)
            bin = ((exact + ROUNDER) - ROUNDER).to(tl.int32) + BINS
            some = (width >= LEAST_NEAR) & (own >= LEAST_FACTOR)
            if CLOSED:
                some &= brought + width >= STATE_BITS
            before = tl.where(some, width, 0)
            brought += width
        size = tl.abs(tl.minimum(tl.maximum(off, -LARGEST - 1), LARGEST))
        shift = tl.maximum(width - 4, 0)
        most = (shift * 0 + MOST_COST) >> shift
        size = (tl.minimum(size, most) << shift).to(tl.uint32)
        error = ((size * size) >> 16).to(tl.int32)
        cost = tl.minimum(cost + tl.where(width > 0, error, 0), MOST_COST)
    after = _bits_from(bits + row * D, last, D)
    if before > 0:
        cost = _allowed(cost, near, before, after, bin)
    if CLOSED:
        end = tl.load(ends + vector, mask=v < n, other=0)
        cost = tl.where(state[None, :] >> after == end[:, None] >> after, cost, MOST_COST + 2)
    best = cost == tl.min(cost, axis=1)[:, None]
    lowest = tl.min(tl.where(best, state[None, :], STATES), axis=1)
    tl.store(ends + vector, lowest & (STATES - 1), mask=v < n)


@triton.jit
def _with_first(state, first, brought):
    """Return states whose bits before the last `brought` ones are those of `first`."""
    older = tl.maximum(-brought + STATE_BITS, 0)
    return (state >> older << older) | (first >> tl.minimum(brought, STATE_BITS))


@triton.jit
def trace(
    windows, ends, taken, bits, place, stop, least, enough, n, D, rounds, CLOSED: tl.constexpr, SOME: tl.constexpr,
    VECTORS: tl.constexpr,
):  # fmt: skip
    """Trace back from `ends` along the choices of `search`. Grid (tiles of vectors, R). CLOSED:
    windows uint8 [R, n, D] are written. Else `ends` is overwritten with the state in which the path
    passed `place`. SOME, place, stop: see `search`."""
    row = tl.program_id(1).to(tl.int64)
    v = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    vector = row * n + v
    state = tl.load(ends + vector, mask=v < n, other=0)
    begin = tl.load(place + row)
    width = _bits_from(bits + row * D, begin, D)
    first = state >> width << width  # older bits are in no window of the ring
    last = begin + D
    if not CLOSED:
        last = tl.load(stop + row)
    if SOME:
        last = tl.where(_due(least, enough, vector, v < n), last, begin)
    left = 0
    for step in range(begin, last):
        left += tl.load(bits + row * D + tl.where(step < D, step, step - D)).to(tl.int32)
    to = taken + (vector * rounds + left) * ROUND_BYTES
    if CLOSED:
        state = _with_first(state, first, left)
    for back in range(last - begin):
        d = last - 1 - back
        d = tl.where(d < D, d, d - D)
        width = tl.load(bits + row * D + d).to(tl.int32)
        if CLOSED:
            tl.store(windows + vector * D + d, tl.where(width > 0, state, 0).to(tl.uint8), mask=v < n)
        for _ in range(width):
            to -= ROUND_BYTES
            state = state & (STATES // 2 - 1)
            byte = tl.load(to + (state >> 3), mask=v < n, other=0).to(tl.int32)
            state = (state << 1) | ((byte >> (state & 7)) & 1)
        left -= width
        if CLOSED:  # the first windows hold bits of the ring's first state
            state = tl.where(width > 0, _with_first(state, first, left), state)
    if not CLOSED:
        tl.store(ends + vector, state, mask=v < n)
