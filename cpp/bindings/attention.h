// One call of attention: query, masks and outputs between torch tensors and the driver.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "call_memory.h"
#include "native_pages.h"
#include "pool.h"
#include "rounding.h"
#include "segment_masks.h"

namespace tersekv {

// Most bytes of scores of rotated means that a call keeps. Each task computes its own beyond that.
constexpr int64_t kMostMeanBytes = int64_t{1} << 26;

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
      : query_(tensor_of("query", query, kFloats)) {
    if (query_.dims != 4) fail("query: ", "expected [B, Hq, q, D]");
    B_ = query_.shape[0];
    q_ = query_.shape[2];
    D_ = in_range("query: ", "D", query_.shape[3], kMostChannels);
    if (std::max(B_, query_.shape[1]) > kMostHeads)
      fail("query: ", "expected at most " + std::to_string(kMostHeads) + " batch rows and heads");
    scores_.scaling = static_cast<float>(scaling);
    scores_.softcap = static_cast<float>(softcap);
    masks_ = SegmentMasks(mask, hidden, B_, q_);
  }

  // Set the number of key-value heads. Query heads are divided evenly among them.
  void set_heads(int64_t H, int threads) {
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
    float* out = memory_.take(B_ * H_ * R_ * D_);
    rows_ = out;
    const auto head = [&](int64_t index) {
      const int64_t Hq = query_.shape[1], b = index / Hq, h = index % Hq;
      for (int64_t i = 0; i < q_; i++) {
        const int64_t at = b * query_.stride[0] + h * query_.stride[1] + i * query_.stride[2];
        float* to = out + (index * q_ + i) * D_;
        if (query_.type == Type::bf16 && query_.stride[3] == 1)
          widen(query_.as<uint16_t>() + at, to);
        else if (query_.type == Type::f32 && query_.stride[3] == 1)
          std::copy_n(query_.as<float>() + at, D_, to);
        else
          for (int64_t d = 0; d < D_; d++) to[d] = float_at(query_, at + d * query_.stride[3]);
      }
    };
    each_head(head, D_, threads);
  }

  int64_t batch() const { return B_; }

  void add(Call call, nb::handle where) {
    if (call.D != D_)
      fail("keys: ", "expected head_dim " + std::to_string(D_) + " of the query, got " + std::to_string(call.D));
    start(call, rows_);
    masks_.locate(call, where);
    check_units(call);
    if (call.T > 0) calls_.push_back(call);
  }

  // where: None for the pages' own positions, or one item per page. table: None, or int32 [B, n]
  // with `page_tokens`.
  void add(const NativePages& pages, nb::handle where, nb::handle table, int64_t page_tokens, int threads) {
    const int64_t D = pages.calls[0].D, inner = pages.keeps_query ? D / 2 : D;
    if (inner != D_)
      fail("keys: ", "expected head_dim " + std::to_string(D_) + " of the query, got " + std::to_string(inner));
    const bool tiles = R_ >= pages.tile_rows;
    const float* rows = tiles && !pages.corrected ? rows_ : mapped(pages, threads);
    map_ = pages.output;
    map_.first = calls_.size();
    if (table.is_none() && !tiles) share_means(pages, rows, D);
    for (size_t i = 0; i < pages.calls.size(); i++) {
      Call call = pages.calls[i];
      start(call, tiles ? rows_ : rows);
      if (call.ends && pages.B != B_) fail("ends: ", "expected a row for each of the query's batch rows");
      call.scores.bias = bias_of(pages, i, rows, D);
      if (!table.is_none()) take_table(call, table, page_tokens);
      const nb::handle own = where.is_none() ? where : nb::handle(item(where, static_cast<Py_ssize_t>(i)));
      if (!own.is_none())
        masks_.locate(call, own);
      else if (pages.marks[i].bits)
        masks_.locate_marks(call, pages.marks[i], pages.first[i]);
      else
        masks_.locate_from(call, pages.first[i]);
      check_units(call);
      if (tiles) {
        call.tiles = true;
        call.D = D_;
        call.adds_mean = pages.keeps_query;
        if (pages.query.given()) call.map = &pages.query;
        call.mapped = call.map ? pages.mapped : 0;
      } else if (const auto [mean, set] = pages.shared[i]; mean >= 0 && !means_.empty()) {
        call.start_marks = &call.keys->parts[1].rope.marks;
        call.start = &means_[mean].sets[set];
        call.keys = call.keys->parts;
        call.start_mean = mean;
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
    float *to = direct ? reinterpret_cast<float*>(target.address) : memory_.take(rows * Dv),
          *to_lse = sums.given() ? reinterpret_cast<float*>(sums.address) : memory_.take(rows);
    {
      nb::gil_scoped_release release;
      if (calls_.empty()) {
        std::fill_n(to, rows * Dv, 0.0f);
        std::fill_n(to_lse, rows, -std::numeric_limits<float>::infinity());
      } else {
        attend(calls_, map_, means_, threads, to, to_lse);
      }
      if (!direct) finish(target, logits, to, to_lse, Dv, threads);
    }
  }

 private:
  // Convert D bfloat16 to float32.
  void widen(const uint16_t* from, float* to) const {
    for (int64_t d = 0; d < D_; d++) to[d] = std::bit_cast<float>(static_cast<uint32_t>(from[d]) << 16);
  }

  void start(Call& call, const float* rows) const {
    call.B = B_;
    call.H = H_;
    call.R = R_;
    call.query = rows;
    call.rounded_query = query_.type == Type::bf16;
    call.scores = scores_;
  }

  // Return the queries of pages [B, H, R, D of their views]: mapped, and then the queries themselves if pages keep
  // them.
  const float* mapped(const NativePages& pages, int threads) {
    const int64_t D = pages.calls[0].D, inner = pages.keeps_query ? D / 2 : D;
    if (!pages.query.given() && !pages.keeps_query) return rows_;
    float* out = memory_.take(B_ * H_ * R_ * D);
    if (pages.query.given()) multiply({B_, H_, R_, pages.mapped, false, pages.query, rows_, D_, out, D}, threads);
    const int64_t done = pages.query.given() ? pages.mapped : 0;
    for (int64_t r = 0; r < B_ * H_ * R_; r++) {
      std::copy_n(rows_ + r * D_ + done, inner - done, out + r * D + done);
      if (pages.keeps_query) std::copy_n(rows_ + r * D_, inner, out + r * D + inner);
    }
    return out;
  }

  // Return the bias of a page's scores, or null. Pages with the same correction share it.
  const float* bias_of(const NativePages& pages, size_t page, const float* query, int64_t D) {
    const float* factors = pages.corrections[page].factors;
    if (!factors) return nullptr;
    for (const auto& [known, bias] : biases_)
      if (known == factors) return bias;
    return biases_.emplace_back(factors, score_bias(pages.corrections[page], query, D)).second;
  }

  // Return scaling² · Σ_d query_d² · factor_d per row, [B, H, R]. query: mapped, [B, H, R, D].
  const float* score_bias(const Correction& correction, const float* query, int64_t D) {
    float* out = memory_.take(B_ * H_ * R_);
    const float factor = scores_.scaling * scores_.scaling;
    for (int64_t head = 0; head < B_ * H_; head++) {
      const float* factors = correction.factors + head / H_ * correction.stride_b + head % H_ * correction.stride_h;
      for (int64_t r = 0; r < R_; r++, query += D) {
        float sum = 0.0f;
        for (int64_t d = 0; d < D_; d++) sum += query[d] * query[d] * factors[d];
        out[head * R_ + r] = factor * sum;
      }
    }
    return out;
  }

  // Make room for the scores of means that pages share. query: [B, H, R, D], with the query itself last.
  void share_means(const NativePages& pages, const float* query, int64_t D) {
    int64_t floats = 0;
    for (const MarkedMean& mean : pages.means)
      for (const int64_t tokens : mean.tokens) floats += B_ * H_ * R_ * (round_up(tokens, kLanes) + kLanes);
    if (floats == 0 || floats > kMostMeanBytes / static_cast<int64_t>(sizeof(float))) return;
    float* room = memory_.take(floats);
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

  // True if a page table may reorder a view's tokens. A list of sparse entries and listed positions
  // depend on the order; consecutive positions count the row's tokens.
  static bool pageable(const View& view) {
    if (view.kind == Kind::sparse) return view.sparse.per_block > 0;
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
      throw NotTaken(
          "keys or values have a list of outliers or listed positions, so a page table cannot reorder their tokens");
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

  // Write out [B, q, Hq, Dv] from rows [B, H, R, Dv], on up to `threads` threads.
  void finish(const Tensor& target, const Tensor& logits, const float* rows, const float* lse, int64_t Dv,
              int threads) const {
    const auto head = [&](int64_t index) {
      const int64_t Hq = query_.shape[1], b = index / Hq, h = index % Hq;
      for (int64_t i = 0; i < q_; i++) {
        const int64_t from = index * q_ + i, to = ((b * q_ + i) * Hq + h) * Dv;
        float share = 1.0f;
        if (logits.given()) share = 1.0f / (1.0f + std::exp(float_at(logits, h * logits.stride[0]) - lse[from]));
        store(target, to, rows + from * Dv, Dv, share);
      }
    };
    each_head(head, Dv, threads);
  }

  // Call body(index) for all query heads of the batch, which copies q rows of `channels` numbers.
  template <class Body>
  void each_head(const Body& body, int64_t channels, int threads) const {
    const int64_t heads = B_ * query_.shape[1];
    const bool few = static_cast<double>(heads * q_ * channels) < team_worth_ns();
    run_in_team(
        heads, few ? 1 : threads,
        [](const void* context, int64_t index) { (*static_cast<const Body*>(context))(index); }, &body);
  }

  static void store(const Tensor& target, int64_t at, const float* row, int64_t n, float share) {
    switch (target.type) {
      case Type::f32:
        return store_as<Float::f32>(target, at, row, n, share);
      case Type::f16:
        return store_as<Float::f16>(target, at, row, n, share);
      default:
        return store_as<Float::bf16>(target, at, row, n, share);
    }
  }

  template <Float type>
  static void store_as(const Tensor& target, int64_t at, const float* row, int64_t n, float share) {
    auto* out = reinterpret_cast<typename Number<type>::Bits*>(target.address) + at;
    for (int64_t d = 0; d < n; d++) out[d] = Number<type>::rounded(row[d] * share);
  }

  Tensor query_;
  int64_t B_ = 0, H_ = 0, q_ = 0, R_ = 0, D_ = 0;
  SegmentMasks masks_;
  Scores scores_;
  const float* rows_ = nullptr;
  CallMemory memory_;
  std::vector<std::pair<const float*, const float*>> biases_;  // factors of a correction, and its bias
  std::vector<Call> calls_;
  std::vector<SharedMean> means_;
  OutputMap map_;
};

}  // namespace tersekv
