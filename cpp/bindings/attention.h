// One call of attention: query, masks and outputs between torch tensors and the driver.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "driver.h"
#include "operands.h"

namespace tersekv {

// Most bytes of scores of rotated means that a call keeps. Each task computes its own beyond that.
constexpr int64_t kMostMeanBytes = int64_t{1} << 26;

// A rotated mean that pages of marked tokens share.
struct MarkedMean {
  View view;                // at all positions, in order
  std::vector<Marks> sets;  // pages of one set have different `skip`
  std::vector<int64_t> tokens;  // of each set
};

// Pages of one layer that are read together: views of keys and values, and the linear maps of both
// sides.
struct NativePages {
  Owner owner;
  std::vector<nb::object> keys, values;
  std::vector<int64_t> first;  // position of each page's first token, or of its first mark
  std::vector<Marks> marks;    // of each page
  std::vector<MarkedMean> means;
  std::vector<std::pair<int, int>> shared;  // of each page: number of its mean and of its set; -1: none
  std::vector<Call> calls;                  // with views, tokens and units only
  HeadMatrix query;            // queries are multiplied with its rows
  bool keeps_query = false;    // the query itself is appended to the mapped query
  OutputMap output;
  const float* correction = nullptr;  // [1 or B, H, D], see `score_bias`; null: none
  int64_t correction_b = 0, correction_h = 0;
  int64_t B = 1, H = 0;

  void check_unmoved() const {
    owner.check_unmoved();
    for (const auto* side : {&keys, &values})
      for (const nb::object& view : *side) nb::cast<const NativeView&>(view).check_unmoved();
  }
};

inline void check_units(const Call& call) {
  if (call.T % call.tokens_per_unit)
    fail("keys and values: ",
         "expected a multiple of " + std::to_string(call.tokens_per_unit) + " tokens, got " + std::to_string(call.T));
}

inline float float_at(const Tensor& x, int64_t i) { return float_at(x.float_type(), x.as<void>(), i); }

// One call of attention. Prepares query and masks for the kernels.
class Attention {
 public:
  Attention(nb::handle query, nb::handle mask, nb::handle hidden, double scaling, double softcap)
      : query_(tensor_of("query", query, kFloats)),
        mask_(optional_tensor("mask", mask, kBool)),
        hidden_(optional_tensor("hidden", hidden, kInt64)) {
    if (query_.dims != 4) fail("query: ", "expected [B, Hq, q, D]");
    B_ = query_.shape[0];
    q_ = query_.shape[2];
    D_ = in_range("query: ", "D", query_.shape[3], kMostChannels);
    if (std::max(B_, query_.shape[1]) > kMostHeads)
      fail("query: ", "expected at most " + std::to_string(kMostHeads) + " batch rows and heads");
    scores_.scaling = static_cast<float>(scaling);
    scores_.softcap = static_cast<float>(softcap);
    if (mask_.given()) {
      tokens_ = mask_.dims == 3 ? mask_.shape[2] : 0;
      expect("", "mask", mask_, {{"B", mask_.dims == 3 && mask_.shape[0] == 1 ? 1 : B_}, {"q", q_}, {"T", tokens_}}, 2);
    }
    if (hidden_.given()) {
      expect("", "hidden", hidden_, {{"B", B_}}, 1);
      for (int64_t b = 0; b < B_; b++) most_hidden_ = std::max(most_hidden_, hidden_of(b));
    }
  }

  // Set the number of key-value heads. Query heads are divided evenly among them.
  void set_heads(int64_t H) {
    H_ = H;
    if (H_ < 1 || query_.shape[1] % H_)
      fail("query: ",
           "expected a multiple of " + std::to_string(H_) + " heads, got " + std::to_string(query_.shape[1]));
    R_ = query_.shape[1] / H_ * q_;
    bool packed = query_.type == Type::f32;
    int64_t step = 1;
    for (int k = 3; k >= 0; k--) {
      packed &= query_.shape[k] == 1 || query_.stride[k] == step;
      step *= query_.shape[k];
    }
    if (packed) {
      rows_ = query_.as<float>();
      return;
    }
    memory_.emplace_back(B_ * H_ * R_ * D_);
    float* out = memory_.back().data();
    rows_ = out;
    for (int64_t b = 0; b < B_; b++)
      for (int64_t h = 0; h < query_.shape[1]; h++)
        for (int64_t i = 0; i < q_; i++) {
          const int64_t at = b * query_.stride[0] + h * query_.stride[1] + i * query_.stride[2];
          for (int64_t d = 0; d < D_; d++) *out++ = float_at(query_, at + d * query_.stride[3]);
        }
  }

  int64_t batch() const { return B_; }

  void add(Call call, nb::handle where) {
    if (call.D != D_)
      fail("keys: ", "expected head_dim " + std::to_string(D_) + " of the query, got " + std::to_string(call.D));
    start(call, rows_);
    locate(call, where);
    check_units(call);
    if (call.T > 0) calls_.push_back(call);
  }

  // where: None for the pages' own positions, or one item per page. table: None, or int32 [B, n]
  // with `page_tokens`.
  void add(const NativePages& pages, nb::handle where, nb::handle table, int64_t page_tokens, int threads) {
    const int64_t D = pages.calls[0].D, inner = pages.keeps_query ? D / 2 : D;
    const float* rows = rows_;
    if (pages.query.given() || pages.keeps_query) {
      if (inner != D_)
        fail("keys: ", "expected head_dim " + std::to_string(D_) + " of the query, got " + std::to_string(inner));
      memory_.emplace_back(B_ * H_ * R_ * D);
      float* out = memory_.back().data();
      if (pages.query.given())
        multiply({B_, H_, R_, inner, false, pages.query, rows_, D_, out, D}, threads, !table.is_none());
      for (int64_t r = 0; r < B_ * H_ * R_; r++) {
        if (!pages.query.given()) std::copy_n(rows_ + r * D_, inner, out + r * D);
        if (pages.keeps_query) std::copy_n(rows_ + r * D_, inner, out + r * D + inner);
      }
      rows = out;
    } else if (D != D_) {
      fail("keys: ", "expected head_dim " + std::to_string(D_) + " of the query, got " + std::to_string(D));
    }
    map_ = pages.output;
    map_.first = calls_.size();
    if (table.is_none()) share_means(pages, rows, D);
    const float* bias = pages.correction ? score_bias(pages, rows, D) : nullptr;
    for (size_t i = 0; i < pages.calls.size(); i++) {
      Call call = pages.calls[i];
      start(call, rows);
      call.scores.bias = bias;
      if (!table.is_none()) take_table(call, table, page_tokens);
      const nb::handle own = where.is_none() ? where : nb::handle(item(where, static_cast<Py_ssize_t>(i)));
      if (!own.is_none())
        locate(call, own);
      else if (pages.marks[i].bits)
        locate_marks(call, pages.marks[i], pages.first[i]);
      else
        locate_from(call, pages.first[i]);
      check_units(call);
      if (const auto [mean, set] = pages.shared[i]; mean >= 0 && !means_.empty()) {
        const MarkedScores& from = means_[mean].sets[set];
        call.keys = call.keys->parts;
        call.start = from.score + pages.marks[i].skip;
        call.start_stride = from.stride;
      }
      if (call.T > 0) calls_.push_back(call);
    }
  }

  // out is [B, q, Hq, Dv] in any float type. If lse float32 [B, H, R] is given, out is float32
  // [B, H, R, Dv], and both can be merged with other tokens. sinks: float [Hq], logits that take
  // part in the softmax without a value.
  void run(nb::handle sinks, nb::handle out, nb::handle lse, int threads) {
    const Tensor target = tensor_of("out", out, kFloats), sums = optional_tensor("lse", lse, kFloat32),
                 logits = optional_tensor("sink logits", sinks, kFloats);
    const int64_t Hq = query_.shape[1], rows = B_ * H_ * R_,
                  Dv = calls_.empty() ? (target.dims ? target.shape[target.dims - 1] : 0) : calls_[0].Dv;
    for (const Call& call : calls_)
      if (call.Dv != Dv)
        fail("values: ",
             "expected head_dim " + std::to_string(Dv) + " in all segments, got " + std::to_string(call.Dv));
    if (sums.given()) {
      expect("", "out", target, {{"B", B_}, {"H", H_}, {"R", R_}, {"Dv", Dv}}, 0);
      expect("", "lse", sums, {{"B", B_}, {"H", H_}, {"R", R_}}, 0);
      if (target.type != Type::f32) fail("out: ", "expected float32");
    } else {
      expect("", "out", target, {{"B", B_}, {"q", q_}, {"Hq", Hq}, {"Dv", Dv}}, 0);
    }
    if (logits.given()) expect("", "sink logits", logits, {{"Hq", Hq}}, 1);
    const bool direct = sums.given() || (target.type == Type::f32 && q_ == 1 && !logits.given());
    std::vector<float> own_out(direct ? 0 : rows * Dv), own_lse(sums.given() ? 0 : rows);
    auto* at = reinterpret_cast<float*>(target.address);
    float *to = direct ? at : own_out.data(),
          *to_lse = sums.given() ? reinterpret_cast<float*>(sums.address) : own_lse.data();
    {
      nb::gil_scoped_release release;
      if (calls_.empty()) {
        std::fill_n(to, rows * Dv, 0.0f);
        std::fill_n(to_lse, rows, -std::numeric_limits<float>::infinity());
      } else {
        attend(calls_, map_, means_, threads, to, to_lse);
      }
      if (!direct) finish(target, logits, to, to_lse, Dv);
    }
  }

 private:
  void start(Call& call, const float* rows) const {
    call.B = B_;
    call.H = H_;
    call.R = R_;
    call.query = rows;
    call.scores = scores_;
  }

  // Return scaling² · Σ_d query_d² · correction_d per row, [B, H, R]. query: mapped, [B, H, R, D].
  const float* score_bias(const NativePages& pages, const float* query, int64_t D) {
    memory_.emplace_back(B_ * H_ * R_);
    float* out = memory_.back().data();
    const float factor = scores_.scaling * scores_.scaling;
    for (int64_t head = 0; head < B_ * H_; head++) {
      const float* correction = pages.correction + head / H_ * pages.correction_b + head % H_ * pages.correction_h;
      for (int64_t r = 0; r < R_; r++, query += D) {
        float sum = 0.0f;
        for (int64_t d = 0; d < D_; d++) sum += query[d] * query[d] * correction[d];
        out[head * R_ + r] = factor * sum;
      }
    }
    return out;
  }

  int64_t hidden_of(int64_t b) const { return hidden_.as<int64_t>()[b * hidden_.stride[0]]; }
  const uint8_t* mask_row(int64_t b, int64_t i) const {
    return mask_.as<uint8_t>() + b * batch_stride(mask_) + i * mask_.stride[1];
  }

  // Set the mask of a call from its tokens' positions or own mask. where: position of the first
  // token; positions, integers [T], [B, T] or [B, H, T] (-1: none); or bool [B, q, T] or
  // [B, H, q, T].
  void locate(Call& call, nb::handle where) {
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
        expect("", "positions", x, {{"B", B_}, {"H", H_}, {"T", T}}, 3);
        if (mask_.given() || !all_there(x)) build_mask(call, x, x.stride[0], x.stride[1], x.stride[2], H_, true);
    }
  }

  static int64_t position(const Tensor& x, int64_t i) {
    return x.type == Type::i32 ? x.as<int32_t>()[i] : x.as<int64_t>()[i];
  }

  bool all_there(const Tensor& x) const {
    for (int64_t b = 0; b < B_; b++)
      for (int64_t h = 0; h < H_; h++)
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
      expect("", "mask", x, {{"B", B_}, {"H", H_}, {"q", rows}, {"T", call.T}}, 3);
    if (rows < 1 || R_ % rows)
      fail("mask: ", "expected q to divide R = " + std::to_string(R_) + ", got " + std::to_string(rows));
    set_mask(call, x.as<uint8_t>(), x.stride[0], x.dims == 4 ? x.stride[1] : 0, x.stride[x.dims - 2], rows);
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
    if (!mask_.given() && most_hidden_ <= first) return;
    const int64_t rows = mask_.given() ? q_ : 1, T = call.T;
    check_position(first + marks.positions - 1);
    uint8_t* out = room(B_ * H_ * rows * T);
    set_mask(call, out, H_ * rows * T, rows * T, T, rows);
    for (int64_t b = 0; b < B_; b++)
      for (int64_t h = 0; h < H_; h++)
        for (int64_t i = 0; i < rows; i++, out += T) {
          const uint8_t* seen = mask_.given() ? mask_row(b, i) + first : nullptr;
          const int64_t hidden = hidden_.given() ? hidden_of(b) - first : 0;
          marks_of(marks, b, h).each(marks.skip, T, [&](int64_t t, int64_t position) {
            out[t] = position >= hidden && (!seen || seen[position]);
          });
        }
  }

  // Make room for the scores of means that pages share. query: [B, H, R, D], with the query itself last.
  void share_means(const NativePages& pages, const float* query, int64_t D) {
    int64_t floats = 0;
    for (const MarkedMean& mean : pages.means)
      for (const int64_t tokens : mean.tokens) floats += B_ * H_ * R_ * (round_up(tokens, kLanes) + kLanes);
    if (floats == 0 || floats > kMostMeanBytes / static_cast<int64_t>(sizeof(float))) return;
    mean_memory_.reset(new float[floats]);
    float* room = mean_memory_.get();
    means_.reserve(pages.means.size());
    for (const MarkedMean& mean : pages.means) {
      SharedMean& made = means_.emplace_back();
      made.view = mean.view;
      for (size_t i = 0; i < mean.sets.size(); i++) {
        const int64_t stride = round_up(mean.tokens[i], kLanes) + kLanes;
        made.sets.push_back({mean.sets[i], room, stride});
        room += B_ * H_ * R_ * stride;
      }
      Call& call = made.scores.call;
      start(call, query + D - D_);
      call.T = made.view.T;
      call.D = D_;
      call.keys = &made.view;
      made.scores.query_stride = D;
      made.scores.sets = made.sets.data();
      made.scores.count = static_cast<int64_t>(made.sets.size());
    }
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

  // True if a page table may reorder a view's tokens. Sparse entries and listed positions depend on the
  // order; consecutive positions count the row's tokens.
  static bool pageable(const View& view) {
    if (view.kind == Kind::sparse) return false;
    if ((view.kind == Kind::roped || view.kind == Kind::rotated_mean) && !view.rope.consecutive) return false;
    for (int64_t i = 0; i < view.count; i++)
      if (!pageable(view.parts[i])) return false;
    return true;
  }

  void take_table(Call& call, nb::handle table, int64_t page_tokens) {
    const Tensor x = tensor_of("pages", table, kInt32);
    const int64_t n = x.dims == 2 ? x.shape[1] : 0;
    expect("", "pages", x, {{"B", B_}, {"n", n}}, 1);
    if (!pageable(*call.keys) || !pageable(*call.values))
      throw NotTaken("keys or values have outliers or listed positions, so a page table cannot reorder their tokens");
    if (page_tokens < 1 || page_tokens % call.tokens_per_unit || call.T % page_tokens)
      fail("pages: ", "expected tokens per page to be a multiple of " + std::to_string(call.tokens_per_unit) +
                          " and to divide T = " + std::to_string(call.T) + ", got " + std::to_string(page_tokens));
    const int64_t count = call.T / page_tokens;
    for (int64_t b = 0; b < B_; b++)
      for (int64_t i = 0; i < n; i++)
        if (const int32_t at = x.as<int32_t>()[b * x.stride[0] + i]; at < -1 || at >= count)
          fail("pages: ", "expected -1 to " + std::to_string(count - 1) + ", got " + std::to_string(at));
    if (__builtin_mul_overflow(n, page_tokens, &call.T) || call.T > kMostElements)
      fail("pages: ", "expected fewer tokens per batch row");
    call.pages = {x.as<int32_t>(), x.stride[0], page_tokens};
  }

  void finish(const Tensor& target, const Tensor& logits, const float* rows, const float* lse, int64_t Dv) const {
    const int64_t Hq = query_.shape[1];
    for (int64_t b = 0; b < B_; b++)
      for (int64_t h = 0; h < Hq; h++)
        for (int64_t i = 0; i < q_; i++) {
          const int64_t from = (b * Hq + h) * q_ + i, to = ((b * q_ + i) * Hq + h) * Dv;
          float share = 1.0f;
          if (logits.given()) share = 1.0f / (1.0f + std::exp(float_at(logits, h * logits.stride[0]) - lse[from]));
          store(target, to, rows + from * Dv, Dv, share);
        }
  }

  static void store(const Tensor& target, int64_t at, const float* row, int64_t n, float share) {
    if (target.type == Type::f32) {
      auto* out = reinterpret_cast<float*>(target.address) + at;
      for (int64_t d = 0; d < n; d++) out[d] = row[d] * share;
    } else if (target.type == Type::f16) {
      auto* out = reinterpret_cast<_Float16*>(target.address) + at;
      for (int64_t d = 0; d < n; d++) out[d] = static_cast<_Float16>(row[d] * share);
    } else {
      auto* out = reinterpret_cast<uint16_t*>(target.address) + at;
      for (int64_t d = 0; d < n; d++) {
        const float x = row[d] * share;
        const auto bits = std::bit_cast<uint32_t>(x);
        out[d] = x != x ? uint16_t{0x7fc0} : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
      }
    }
  }

  Tensor query_, mask_, hidden_;
  int64_t B_ = 0, H_ = 0, q_ = 0, R_ = 0, D_ = 0, tokens_ = 0, most_hidden_ = 0;
  Scores scores_;
  const float* rows_ = nullptr;
  std::vector<std::vector<float>> memory_;
  std::vector<std::vector<uint8_t>> masks_;
  std::vector<Call> calls_;
  std::vector<SharedMean> means_;
  std::unique_ptr<float[]> mean_memory_;
  OutputMap map_;
};

}  // namespace tersekv
