// Masks of the segments of one call: columns of the call's mask, by the positions of tokens.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "operands.h"

namespace tersekv {

class SegmentMasks {
 public:
  SegmentMasks() = default;
  SegmentMasks(nb::handle mask, nb::handle hidden, int64_t B, int64_t q)
      : mask_(optional_tensor("mask", mask, kBool)), hidden_(optional_tensor("hidden", hidden, kInt64)), B_(B), q_(q) {
    if (mask_.given()) {
      tokens_ = mask_.dims == 3 ? mask_.shape[2] : 0;
      expect("", "mask", mask_, {{"B", mask_.dims == 3 && mask_.shape[0] == 1 ? 1 : B_}, {"q", q_}, {"T", tokens_}}, 2);
    }
    if (hidden_.given()) {
      expect("", "hidden", hidden_, {{"B", B_}}, 1);
      for (int64_t b = 0; b < B_; b++) most_hidden_ = std::max(most_hidden_, hidden_of(b));
    }
  }

  // Set the mask of a call from its tokens' positions or own mask. where: position of the first
  // token; positions, integers [T], [B, T] or [B, H, T] (-1: none); or bool [B, q, T] or
  // [B, H, q, T]. None: the tokens end with the queries' own, and a query sees no later ones. A tuple: see
  // locate_heads.
  void locate(Call& call, nb::handle where) {
    if (where.is_none()) return set_causal(call);
    if (PyTuple_Check(where.ptr())) return locate_heads(call, item(where, 0), item(where, 1));
    if (PyLong_Check(where.ptr())) return locate_from(call, as_int(where.ptr()));
    const Tensor x = tensor_of("positions", where, kBool | kInt32 | kInt64);
    if (x.type == Type::b8) return take_mask(call, x);
    const int64_t T = call.T;
    switch (x.dims) {
      case 1:
        expect("", "positions", x, {{"T", T}}, 1);
        if (mask_.given() || most_hidden_ > 0) build_mask(call, x, 0, 0, x.stride[0], 1, false);
        return;
      case 2:
        expect("", "positions", x, {{"B", B_}, {"T", T}}, 2);
        if (mask_.given()) build_mask(call, x, x.stride[0], 0, x.stride[1], 1, true);
        return;
      default:
        expect("", "positions", x, {{"B", B_}, {"H", call.H}, {"T", T}}, 3);
        if (mask_.given() || !all_there(call, x))
          build_mask(call, x, x.stride[0], x.stride[1], x.stride[2], call.H, true);
    }
  }

  // Set the mask of tokens of one head after those of another. where: positions int32 [T], -1: none; or their own mask,
  // bool [q, T]. ends: int64 [B, H], in tokens, see `Call`.
  void locate_heads(Call& call, nb::handle where, nb::handle ends) {
    const int64_t T = call.T, heads = B_ * call.H;
    const Tensor x = tensor_of("positions", where, kBool | kInt32), end = tensor_of("ends", ends, kInt64);
    expect("", "ends", end, {{"B", B_}, {"H", call.H}}, 0);
    call.ends = end.as<int64_t>();
    check_ends(call);
    if (x.type == Type::b8) {
      const int64_t own = x.dims == 2 ? x.shape[0] : 0;
      expect("", "mask", x, {{"q", own}, {"T", T}}, 1);
      if (own < 1 || call.R % own) fail("mask: ", "expected q to divide R = " + std::to_string(call.R));
      return set_mask(call, x.as<uint8_t>(), 0, 0, x.stride[0], own);
    }
    expect("", "positions", x, {{"T", T}}, 0);
    const auto* at = x.as<int32_t>();
    int32_t least = 0, most = -1;
    for (int64_t t = 0; t < T; t++) {
      least = std::min(least, at[t]);
      most = std::max(most, at[t]);
    }
    if (!mask_.given() && least >= 0) return;
    check_position(most);
    const int64_t rows = mask_.given() ? q_ : 1;
    uint8_t* out = room(rows * T);
    set_mask(call, out, 0, 0, T, rows);
    for (int64_t i = 0; i < rows; i++, out += T)
      for (int64_t head = 0, t = 0; head < heads; head++) {
        const uint8_t* seen = mask_.given() ? mask_row(head / call.H, i) : nullptr;
        for (; t < call.ends[head]; t++) out[t] = at[t] >= 0 && (!seen || seen[at[t]]);
      }
  }

  // Set the mask of tokens at consecutive positions.
  void locate_from(Call& call, int64_t first) {
    if (first < 0) fail("positions: ", "expected 0 or more, got " + std::to_string(first));
    if (!mask_.given() && most_hidden_ <= first) return;
    check_position(first + call.T - 1);
    if (most_hidden_ <= first)
      return set_mask(call, mask_row(0, 0) + first, batch_stride(mask_), 0, mask_.stride[1], q_);
    const int64_t rows = mask_.given() ? q_ : 1, T = call.T;
    uint8_t* out = room(B_ * rows * T);
    set_mask(call, out, rows * T, 0, T, rows);
    for (int64_t b = 0; b < B_; b++)
      for (int64_t i = 0; i < rows; i++, out += T) {
        const int64_t start = std::clamp<int64_t>(hidden_of(b) - first, 0, T);
        std::fill_n(out, start, 0);
        if (mask_.given())
          std::copy_n(mask_row(b, i) + first + start, T - start, out + start);
        else
          std::fill_n(out + start, T - start, 1);
      }
  }

  // Set the mask of tokens at marks that count from position `first` on.
  void locate_marks(Call& call, const Marks& marks, int64_t first) {
    if (call.ends) check_ends(call);
    if (!mask_.given() && most_hidden_ <= first) return;
    const int64_t rows = mask_.given() ? q_ : 1, T = call.T, each = call.ends ? 0 : rows * T;
    check_position(first + marks.positions - 1);
    uint8_t* out = room(each ? B_ * call.H * each : rows * T);
    set_mask(call, out, call.H * each, each, T, rows);
    for (int64_t head = 0, from = 0; head < B_ * call.H; head++) {
      const int64_t end = call.ends ? call.ends[head] : T;
      const HeadMarks own = marks_of(marks, head / call.H, head % call.H);
      for (int64_t i = 0; i < rows; i++) {
        const uint8_t* seen = mask_.given() ? mask_row(head / call.H, i) + first : nullptr;
        const int64_t hidden = hidden_.given() ? hidden_of(head / call.H) - first : 0;
        uint8_t* to = out + head * each + i * T + from;
        own.each(own.skip + from, end - from,
                 [&](int64_t t, int64_t position) { to[t] = position >= hidden && (!seen || seen[position]); });
      }
      if (call.ends) from = end;
    }
  }

 private:
  void check_ends(const Call& call) const {
    for (int64_t head = 0, first = 0; head < B_ * call.H; first = call.ends[head++])
      if (call.ends[head] < first || call.ends[head] > call.T || call.ends[head] % call.tokens_per_unit)
        fail("ends: ", "expected multiples of " + std::to_string(call.tokens_per_unit) + " tokens that ascend to " +
                           std::to_string(call.T));
  }

  int64_t hidden_of(int64_t b) const { return hidden_.as<int64_t>()[b * hidden_.stride[0]]; }
  const uint8_t* mask_row(int64_t b, int64_t i) const {
    return mask_.as<uint8_t>() + b * batch_stride(mask_) + i * mask_.stride[1];
  }

  static int64_t position(const Tensor& x, int64_t i) {
    return x.type == Type::i32 ? x.as<int32_t>()[i] : x.as<int64_t>()[i];
  }

  static bool all_there(const Call& call, const Tensor& x) {
    for (int64_t b = 0; b < call.B; b++)
      for (int64_t h = 0; h < call.H; h++)
        for (int64_t t = 0; t < x.shape[2]; t++)
          if (position(x, b * x.stride[0] + h * x.stride[1] + t * x.stride[2]) < 0) return false;
    return true;
  }

  void take_mask(Call& call, const Tensor& x) const {
    if (x.dims != 3 && x.dims != 4) fail("mask: ", "expected [B, q, T] or [B, H, q, T]");
    const int64_t rows = x.shape[x.dims - 2];
    if (x.dims == 3)
      expect("", "mask", x, {{"B", B_}, {"q", rows}, {"T", call.T}}, 2);
    else
      expect("", "mask", x, {{"B", B_}, {"H", call.H}, {"q", rows}, {"T", call.T}}, 3);
    if (rows < 1 || call.R % rows)
      fail("mask: ", "expected q to divide R = " + std::to_string(call.R) + ", got " + std::to_string(rows));
    set_mask(call, x.as<uint8_t>(), x.stride[0], x.dims == 4 ? x.stride[1] : 0, x.stride[x.dims - 2], rows);
  }

  void set_causal(Call& call) const {
    if (mask_.given() || most_hidden_ > 0) throw NotTaken("causal tokens with a mask");
    if (call.T < q_) fail("keys: ", "expected at least " + std::to_string(q_) + " tokens, as many as queries");
    call.scores.causal = true;
    call.scores.q = q_;
  }

  static void set_mask(Call& call, const uint8_t* mask, int64_t b, int64_t h, int64_t q, int64_t rows) {
    call.scores.mask = mask;
    call.scores.stride_b = b;
    call.scores.stride_h = h;
    call.scores.stride_q = q;
    call.scores.q = rows;
  }

  void check_position(int64_t last) const {
    if (mask_.given() && last >= tokens_)
      fail("mask: ", "expected at least " + std::to_string(last + 1) + " tokens, got " + std::to_string(tokens_));
  }

  void build_mask(Call& call, const Tensor& x, int64_t by_row, int64_t by_head, int64_t by_token, int64_t heads,
                  bool ignores_hidden) {
    const int64_t rows = mask_.given() ? q_ : 1, T = call.T;
    uint8_t* out = room(B_ * heads * rows * T);
    set_mask(call, out, heads * rows * T, heads == 1 ? 0 : rows * T, T, rows);
    for (int64_t b = 0; b < B_; b++)
      for (int64_t h = 0; h < heads; h++) {
        const int64_t base = b * by_row + h * by_head, hidden = ignores_hidden || !hidden_.given() ? 0 : hidden_of(b);
        int64_t last = -1;
        for (int64_t t = 0; t < T; t++) last = std::max(last, position(x, base + t * by_token));
        check_position(last);
        for (int64_t i = 0; i < rows; i++, out += T) {
          const uint8_t* seen = mask_.given() ? mask_row(b, i) : nullptr;
          for (int64_t t = 0; t < T; t++) {
            const int64_t at = position(x, base + t * by_token);
            out[t] = at >= hidden && (at >= 0) && (!seen || seen[at]);
          }
        }
      }
  }

  uint8_t* room(int64_t bytes) {
    masks_.emplace_back(bytes);
    return masks_.back().data();
  }

  Tensor mask_, hidden_;
  int64_t B_ = 0, q_ = 0, tokens_ = 0, most_hidden_ = 0;
  std::vector<std::vector<uint8_t>> masks_;  // memory of masks that were built
};

}  // namespace tersekv
