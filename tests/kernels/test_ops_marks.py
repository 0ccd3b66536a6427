"""Packed pages of tokens whose positions are the bits of a mask, against the reference.

Two sets of tokens share the positions of a range, as with two rates. A call computes the scores of
their rotated mean once, at all positions in order, and each page takes its own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from native_calls import why_not
from packed_views import rope
from tersekv.kernels import attend as attend_operator
from tersekv.kernels.attend import Masks, PackedPages
from tersekv.kernels.cpu import attend as cpu_attend
from tersekv.kernels.marks import Marks, pack_bits, unpack_bits
from tersekv.layouts.base import View
from tersekv.layouts.exact import ExactView
from tersekv.layouts.mean_removed import MeanRemoved, RotatedMean
from tersekv.layouts.roped import Roped
from tersekv.transforms.angles import Angles
from tersekv.transforms.marked_angles import MarkedAngles
from test_ops_parity import isa, one_thread, pytestmark  # noqa: F401

B, H, G, D = 2, 2, 5, 64
FIRST = 5
PADDING = torch.tensor([0, 40])


def bits_of(n: int, high: int) -> Tensor:
    """Return bits [B, H, n / 8], `high` of them 1 in each head."""
    order = torch.rand(B, H, n).argsort(-1)
    return pack_bits(torch.zeros(B, H, n, dtype=torch.bool).scatter_(2, order[:, :, :high], True))


def exact(tokens: int) -> ExactView:
    return ExactView({"x": torch.randn(B, H, tokens, 1, D)})


def pages_of(n: int, high: int, kind: str, padding: Tensor | None = None, after: int = 24) -> PackedPages:
    """Return two pages of each set and one of tokens after the range, with codes that are exact.

    kind: keys have a rotated "mean", are "roped", or are "plain".
    """
    bits, mean = bits_of(n, high), torch.randn(B, H, D)
    where: list[Marks | int] = []
    for value, tokens in ((True, high), (False, n - high)):
        cut = tokens // 3
        where += [Marks(bits, FIRST, cut, value), Marks(bits, FIRST, tokens - cut, value, cut)]
    where.append(FIRST + n)
    counts = [place.tokens if isinstance(place, Marks) else after for place in where]
    keys: list[View] = []
    for place, tokens in zip(where, counts, strict=True):
        of, view = rope("halves", D), exact(tokens)
        marked = isinstance(place, Marks)
        angles: Angles | MarkedAngles = (
            MarkedAngles(of, place, padding) if marked else of.angles(place, tokens, padding)
        )
        if kind == "mean":
            keys.append(MeanRemoved(view, RotatedMean(mean, of, angles)))
        else:
            keys.append(Roped(view, of, angles) if kind == "roped" else view)
    values = [exact(tokens) for tokens in counts]
    maps = keys[0].linear, values[0].linear
    operands = [[view.inner.operand for view in side] for side in (keys, values)]
    return PackedPages(*operands, where, counts, maps, H)


def ragged(n: int, kind: str, padding: Tensor | None = None) -> tuple[PackedPages, PackedPages]:
    """Return pages of two rates of heads that have different numbers of tokens at each, and the same without `ends`.

    The first head of a row has the first rate where bits are 1, the second head where they are 0. A page of the first
    rate has no tokens of the second head.
    """
    high = torch.tensor([[n // 4, n // 2], [n // 8, 0]])
    order = torch.rand(B, H, n).argsort(-1).argsort(-1)
    bits, mean, of = pack_bits(order < high[..., None]), torch.randn(B, H, D), rope("halves", D)
    value = torch.tensor([True, False])
    own = torch.where(value, high, n - high)
    cut = own // 3 * torch.tensor([1, 0])
    sides: list[list] = [[], [], [], [], [], []]
    for first, before, count in ((True, own * 0, cut), (True, cut, own - cut), (False, own * 0, n - own)):
        ends, most = count.flatten().cumsum(0).view(B, H), int(count.max())
        there = torch.arange(most) < count[..., None]
        marks = Marks(bits, FIRST, int(ends[-1, -1]), value == first, before - (ends - count), ends)
        padded = torch.full((B, H, most), -1, dtype=torch.int32)
        padded[there] = marks.positions().flatten()
        x = [torch.randn(B, H, most, D) for _ in range(2)]
        flat = [y[there].expand(B, H, -1, -1) for y in x]
        views = []
        for keys, angles in (
            (flat[0], MarkedAngles(of, marks, padding)),
            (x[0], of.angles_at((padded - (0 if padding is None else padding[:, None, None])).clamp(min=0))),
        ):
            view = ExactView({"x": keys.unsqueeze(3)})
            if kind == "mean":
                views.append(MeanRemoved(view, RotatedMean(mean, of, angles)))
            else:
                views.append(Roped(view, of, angles) if kind == "roped" else view)
        values = [ExactView({"x": y.unsqueeze(3)}) for y in (flat[1], x[1])]
        for side, one in zip(sides, (*views, *values, marks, padded), strict=True):
            side.append(one)
    flat_keys, keys, flat_values, values, where, positions = sides
    maps = keys[0].linear, values[0].linear
    of_pages = [[[view.inner.operand for view in side] for side in both]
                for both in ((flat_keys, flat_values), (keys, values))]  # fmt: skip
    if padding is not None:
        positions = [at.masked_fill(at < padding[:, None, None] + FIRST, -1) for at in positions]
    padded_pages = PackedPages(*of_pages[1], positions, [at.shape[2] for at in positions], maps, H)
    ends_of = [place.ends for place in where]
    tokens = [place.tokens for place in where]
    return PackedPages(*of_pages[0], where, tokens, maps, H, ends=ends_of, padded=lambda: padded_pages), padded_pages


@pytest.mark.parametrize(("threads", "q"), [(1, 1), (3, 1), (3, 14)])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["", "padded"])
@pytest.mark.parametrize("n", [4096, 1280, 64])
@pytest.mark.parametrize("kind", ["mean", "roped", "plain"])
def test_heads_with_different_numbers_of_tokens(isa, kind, n, padding, threads, q):  # noqa: F811
    torch.manual_seed(n)
    torch.set_num_threads(threads)
    pages, _ = ragged(n, kind, padding)
    for mask in (None, torch.rand(B, q, FIRST + n) < 0.7):
        got, wanted = both(pages, mask, None if padding is None else padding + FIRST, q)
        assert (got - wanted).norm() <= 2e-3 * wanted.norm()


def test_positions_of_heads_one_after_the_other():
    torch.manual_seed(2)
    pages, padded = ragged(128, "plain")
    for where, places in zip(pages.where, padded.where, strict=True):
        assert where.positions().shape == (1, 1, where.tokens)
        rows = [where.positions()[0, 0, where.head == h].tolist() for h in range(B * H)]
        assert rows == [[p for p in own.tolist() if p >= 0] for own in places.flatten(0, 1)]


def both(pages: PackedPages, mask: Tensor | None, hidden: Tensor | None, q: int) -> tuple[Tensor, Tensor]:
    """Return the output of the kernels and of the reference, for q queries next to exact tokens."""
    query = 0.5 * torch.randn(B, H * G, q, D)
    alone = torch.randn(B, H, 3, D), torch.randn(B, H, 3, D), 0
    args = query, (alone,), pages, mask, hidden, D**-0.5
    return cpu_attend.attend(*args), attend_operator.attend.reference(*args)


@pytest.mark.parametrize(("threads", "q"), [(1, 1), (3, 1), (3, 14)])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["", "padded"])
@pytest.mark.parametrize(("n", "high"), [(4096, 1024), (1288, 500), (64, 3), (8, 8)])
@pytest.mark.parametrize("kind", ["mean", "roped", "plain"])
def test_kernels_equal_the_reference(isa, kind, n, high, padding, threads, q):  # noqa: F811
    torch.manual_seed(n)
    torch.set_num_threads(threads)  # `one_thread` resets it
    pages = pages_of(n, high, kind, padding)
    for _ in range(2):  # the second call has the arguments of the first
        got, wanted = both(pages, None, None if padding is None else padding + FIRST, q)
        assert (got - wanted).norm() <= 2e-3 * wanted.norm()


@pytest.mark.parametrize("hidden", [None, torch.tensor([0, 77])], ids=["", "padded"])
@pytest.mark.parametrize("kind", ["mean", "plain"])
def test_masks_of_several_queries(isa, kind, hidden):  # noqa: F811
    torch.manual_seed(1)
    pages, q = pages_of(1288, 500, kind), 13
    mask = torch.rand(B, q, FIRST + 1288 + 24) < 0.7
    got, wanted = both(pages, mask, hidden, q)
    assert (got - wanted).norm() <= 2e-3 * wanted.norm()


def test_pages_whose_rows_start_elsewhere_share_no_mean():
    """Both pages have the mean of the same bits, from another position on in the second row alone."""
    torch.manual_seed(3)
    bits, mean, of = bits_of(128, 64), torch.randn(B, H, D), rope("halves", D)
    marks = [Marks(bits, FIRST, 32, True), Marks(bits, FIRST, 32, True, 32)]
    paddings = PADDING, PADDING + torch.tensor([0, 30])
    keys = [
        MeanRemoved(exact(32), RotatedMean(mean, of, MarkedAngles(of, place, padding)))
        for place, padding in zip(marks, paddings, strict=True)
    ]
    operands = [view.inner.operand for view in keys], [exact(32).operand for _ in keys]
    pages = PackedPages(*operands, marks, [32, 32], (keys[0].linear, exact(32).linear), H)
    got, wanted = both(pages, None, paddings[1] + FIRST, 1)
    assert (got - wanted).norm() <= 2e-3 * wanted.norm()


@pytest.mark.parametrize("T", [1, 33, 500])
def test_a_rotated_mean_alone(isa, T):  # noqa: F811
    """Without a page that shares it, a task lists the positions of its own tokens."""
    torch.manual_seed(T)
    torch.set_num_threads(3)
    marks, of = Marks(bits_of(1288, 600), FIRST, T, True, 77), rope("halves", D)
    keys, values = RotatedMean(torch.randn(B, H, D), of, MarkedAngles(of, marks, PADDING)), exact(T)
    query = 0.3 * torch.randn(B, H, G, D)
    args = query, keys.operand, values.operand, None, D**-0.5, None
    assert why_not(cpu_attend.attend_packed, *args) is None
    got, wanted = cpu_attend.attend_packed(*args)[0], cpu_attend.packed_operators.attend_packed.reference(*args)[0]
    assert (got - wanted).norm() <= 2e-3 * wanted.norm()


def test_positions_follow_from_the_bits():
    torch.manual_seed(0)
    bits = bits_of(96, 40)
    mask = unpack_bits(bits)
    assert torch.equal(pack_bits(mask), bits)
    for value in (True, False):
        tokens = 40 if value else 56
        whole = Marks(bits, FIRST, tokens, value)
        assert torch.equal(whole.positions(), (mask == value).nonzero()[:, 2].view(B, H, -1).int() + FIRST)
        assert torch.equal(whole.part(7, 20).part(2, 5).positions(), whole.positions()[:, :, 9:14])
    assert Masks(None, None).at(whole, 56) is None


def test_marks_of_too_few_tokens_are_refused():
    """The extension counts the bits, because it writes the scores of all tokens."""
    pages, of = pages_of(64, 16, "mean"), rope("halves", D)
    bits = pages.where[0].bits
    marks = Marks(bits, FIRST, 16, True, 1)
    wrong = MeanRemoved(exact(16), RotatedMean(torch.randn(B, H, D), of, MarkedAngles(of, marks, None)))
    with pytest.raises(ValueError, match="expected 17 tokens, got 16"):
        cpu_attend.attend_packed(torch.randn(B, H, G, 2 * D), wrong.inner.operand, exact(16).operand, None, 1.0, None)
    for n, value in ((64, True), (72, False)):  # 8 positions in the last of two words
        marks = Marks(bits_of(n, 16), FIRST, 57, value)
        wrong = MeanRemoved(exact(57), RotatedMean(torch.randn(B, H, D), of, MarkedAngles(of, marks, None)))
        with pytest.raises(ValueError, match=f"expected 57 tokens, got {16 if value else 56}"):
            cpu_attend.native_pages(PackedPages(*[[x] for x in (wrong.inner.operand, exact(57).operand)], [marks], [57],
                                                (wrong.linear, exact(57).linear), H))  # fmt: skip
    pages.where = (pages.where[0]._replace(skip=1000), *pages.where[1:])
    with pytest.raises(ValueError, match="expected 1005 tokens, got 16"):
        cpu_attend.native_pages(pages)
    for of_wrong_shape in (bits[:, :1], bits[0]):
        pages.where = (pages.where[0]._replace(bits=of_wrong_shape, skip=0), *pages.where[1:])
        with pytest.raises(ValueError, match="marks"):
            cpu_attend.native_pages(pages)
