// Recursive polar coordinates. A token's pair (2j, 2j + 1) is w_j·(cos a_j, sin a_j). a_j is an
// angle of level 1; w_j is the radius times cosines and sines of the levels above. A score is Σ
// w_j·(q_2j·cos a_j + q_2j+1·sin a_j). The factor in brackets has 2^bits values, looked up in a
// table per pair and query row.
#pragma once

#include "polar_own.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

// Angles and radii of sixteen tokens of a block, from the first of them on.
struct PolarTokens {
  const uint8_t* angles;
  const uint16_t* radii;
};

inline PolarTokens polar_tokens(const Node& node, int64_t token) {
  const PolarView& v = node.view->polar;
  const int64_t n = token / kPolarTokens, lane = token % kPolarTokens;
  return {v.angles + node.b * v.stride_b + node.h * v.stride_h + n * v.stride_n + lane,
          plane_at(v.radii, node.b, node.h, n) + lane};
}

// Return code `index` of a level; higher bits are undefined.
template <class S>
[[gnu::always_inline]] inline typename S::Words polar_code(const PolarView& v, const PolarOwn& own, PolarTokens at,
                                                           int level, int64_t index) {
  const int64_t bit = own.offset[level] + index * v.bits[level];
  const uint8_t* byte = at.angles + bit / 8 * kPolarTokens;
  const int shift = bit % 8;
  typename S::Words word = S::load_bytes(byte);
  if (shift + v.bits[level] > 8) word = S::either(word, S::shift_left(S::load_bytes(byte + kPolarTokens), 8));
  return shift ? S::shift_right(word, shift) : word;
}

template <class S>
[[gnu::always_inline]] inline typename S::F polar_look_up(const float* table, int bits, typename S::Words code) {
  return bits <= 4 ? S::look_up(table, code) : S::gather(table, S::with(code, (1u << bits) - 1));
}

// Compute w of the pairs under radius k: own.pairs weights, `step` floats apart.
template <class S>
void polar_weights(const PolarView& v, const PolarOwn& own, PolarTokens at, int64_t k, float* w, int64_t step) {
  using F = typename S::F;
  S::store(w, S::mul(load_half<S>(v.half, at.radii + k * kPolarTokens), S::set1(v.unit)));
  for (int level = v.levels - 1; level >= 1; level--) {
    const int64_t span = int64_t{1} << (level - 1), nodes = own.pairs / (2 * span);
    for (int64_t j = 0; j < nodes; j++) {
      const typename S::Words code = polar_code<S>(v, own, at, level, k * nodes + j);
      float *first = w + 2 * j * span * step, *second = first + span * step;
      const F radius = S::load(first);
      S::store(second, S::mul(radius, polar_look_up<S>(own.sin[level], v.bits[level], code)));
      S::store(first, S::mul(radius, polar_look_up<S>(own.cos[level], v.bits[level], code)));
    }
  }
}

// Compute the eight weights under radius k if levels have 4, 2, 2 and 2 bits.
template <class S>
[[gnu::always_inline]] inline void polar_usual_weights(const PolarView& v, const PolarOwn& own, PolarTokens at,
                                                       int64_t k, typename S::F (&w)[8]) {
  using F = typename S::F;
  using Words = typename S::Words;
  const F radius = S::mul(load_half<S>(v.half, at.radii + k * kPolarTokens), S::set1(v.unit));
  const auto third = static_cast<uint64_t>(own.offset[2] + 4 * k),
             fourth = static_cast<uint64_t>(own.offset[3] + 2 * k);
  const Words c3 = S::shift_right(S::load_bytes(at.angles + third / 8 * kPolarTokens), third % 8);
  Words c4 = S::shift_right(S::load_bytes(at.angles + fourth / 8 * kPolarTokens), fourth % 8);
  c4 = S::with(S::shift_left(c4, 2), 12);
  const Words left = S::either(S::with(c3, 3), c4), right = S::either(S::with(S::template shr<2>(c3), 3), c4);
  const F u[4] = {S::mul(radius, S::look_up(own.upper, left)), S::mul(radius, S::look_up(own.upper + 16, left)),
                  S::mul(radius, S::look_up(own.upper + 32, right)), S::mul(radius, S::look_up(own.upper + 48, right))};
  const Words c2 = S::load_bytes(at.angles + (own.offset[1] / 8 + k) * kPolarTokens);
  repeat<4>([&](auto i) TERSEKV_INLINE {
    const Words code = S::template shr<2 * i>(c2);
    w[2 * i] = S::mul(u[i], S::look_up(own.cos[1], code));
    w[2 * i + 1] = S::mul(u[i], S::look_up(own.sin[1], code));
  });
}

template <class S>
void polar_tile(const Node& node, int64_t token, int64_t, float* tile) {
  const PolarView& v = node.view->polar;
  const PolarOwn& own = *static_cast<PolarOwn*>(node.own);
  const PolarTokens at = polar_tokens(node, token);
  for (int64_t k = 0; k < node.view->D >> v.levels; k++) {
    float* out = tile + (k << v.levels) * kLanes;
    polar_weights<S>(v, own, at, k, out, 2 * kLanes);
    for (int64_t j = 0; j < own.pairs; j++, out += 2 * kLanes) {
      const typename S::Words code = polar_code<S>(v, own, at, 0, k * own.pairs + j);
      const typename S::F w = S::load(out);
      S::store(out + kLanes, S::mul(w, polar_look_up<S>(own.sin[0], v.bits[0], code)));
      S::store(out, S::mul(w, polar_look_up<S>(own.cos[0], v.bits[0], code)));
    }
  }
}

template <class S, int R>
void polar_usual_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  using F = typename S::F;
  const PolarView& v = node.view->polar;
  const PolarOwn& own = *static_cast<PolarOwn*>(node.own);
  const int64_t pairs = node.view->D / 2, blocks = node.view->D / 16;
  for (int64_t token = span.first; token < span.last; token += kLanes) {
    const PolarTokens at = polar_tokens(node, token);
    F even[R], odd[R];
    repeat<R>([&](auto r) TERSEKV_INLINE { even[r] = odd[r] = S::zero(); });
    for (int64_t k = 0; k < blocks; k++) {
      F w[8];
      polar_usual_weights<S>(v, own, at, k, w);
      const float* table = own.query + (span.row * pairs + 8 * k) * kLanes;
      repeat<4>([&](auto j) TERSEKV_INLINE {
        const typename S::Words low = S::load_bytes(at.angles + (4 * k + j) * kPolarTokens),
                                high = S::template shr<4>(low);
        repeat<R>([&](auto r) TERSEKV_INLINE {
          const float* entries = table + (r * pairs + 2 * j) * kLanes;
          even[r] = S::fma(w[2 * j], S::look_up(entries, low), even[r]);
          odd[r] = S::fma(w[2 * j + 1], S::look_up(entries + kLanes, high), odd[r]);
        });
      });
    }
    repeat<R>([&](auto r) TERSEKV_INLINE {
      float* out = score + r * score_stride + token - span.first;
      S::store(out, S::add(S::load(out), S::add(even[r], odd[r])));
    });
  }
}

template <class S>
void polar_scores(const Node& node, Span span, float* score, int64_t score_stride) {
  const PolarOwn& own = *static_cast<PolarOwn*>(node.own);
  if (own.fast)
    return node.call->polar->scores(own.fast, {span.row, span.rows, span.first, span.last}, score, score_stride,
                                    span.row ? nullptr : node.call->values);
  if (own.usual)
    return with_rows(span.rows, [&](auto rows) { polar_usual_scores<S, rows>(node, span, score, score_stride); });
  tile_scores<S>(node, span, score, score_stride, own.tile, polar_tile<S>);
}

// Sums of four channels (two pairs) for R rows stay in registers over all tokens of the span; w:
// [eight pairs][tokens].
template <class S, int R>
void polar_usual_sums(const Node& node, Span span, const float* weight, int64_t weight_stride) {
  using F = typename S::F;
  const PolarView& v = node.view->polar;
  const PolarOwn& own = *static_cast<PolarOwn*>(node.own);
  const int64_t tokens = span.tokens(), n = span.first / kPolarTokens;
  const uint8_t* angles = v.angles + node.b * v.stride_b + node.h * v.stride_h + n * v.stride_n;
  const uint16_t* radii = plane_at(v.radii, node.b, node.h, n);
  float* w = own.tile;
  const typename S::template Table<4> cos(own.cos[0]), sin(own.sin[0]);
  for (int64_t k = 0; k < node.view->D / 16; k++) {
    PolarTokens at = {angles, radii};
    for (int64_t i = 0; i < tokens; i += kPolarTokens, at.angles += v.stride_n, at.radii += v.radii.stride_n)
      repeat<2>([&](auto g) TERSEKV_INLINE {
        F pair[8];
        polar_usual_weights<S>(v, own, {at.angles + g * kLanes, at.radii + g * kLanes}, k, pair);
        repeat<8>([&](auto j) TERSEKV_INLINE { S::store(w + j * tokens + i + g * kLanes, pair[j]); });
      });
    for (int64_t j = 0; j < 4; j++) {
      F sum[4][R];
      repeat<4>([&](auto c) TERSEKV_INLINE { repeat<R>([&](auto r) TERSEKV_INLINE { sum[c][r] = S::zero(); }); });
      const float *first = w + 2 * j * tokens, *second = first + tokens;
      const uint8_t* codes = angles + (4 * k + j) * kPolarTokens;
      for (int64_t i = 0; i < tokens; i += kPolarTokens, codes += v.stride_n)
        repeat<2>([&](auto g) TERSEKV_INLINE {
          const int64_t to = i + g * kLanes;
          const typename S::Words low = S::load_bytes(codes + g * kLanes), high = S::template shr<4>(low);
          const F a = S::load(first + to), b = S::load(second + to);
          const F x[4] = {S::mul(a, cos.at(low)), S::mul(a, sin.at(low)), S::mul(b, cos.at(high)),
                          S::mul(b, sin.at(high))};
          repeat<R>([&](auto r) TERSEKV_INLINE {
            const F p = S::load(weight + r * weight_stride + to);
            repeat<4>([&](auto c) TERSEKV_INLINE { sum[c][r] = S::fma(p, x[c], sum[c][r]); });
          });
        });
      repeat<R>([&](auto r) TERSEKV_INLINE {
        repeat<4>([&](auto c) TERSEKV_INLINE { node.sum_row(span.row + r)[16 * k + 4 * j + c] += S::hsum(sum[c][r]); });
      });
    }
  }
}

template <class S>
void polar_sums(const Node& node, Span span, const float* weight, int64_t weight_stride) {
  const PolarOwn& own = *static_cast<PolarOwn*>(node.own);
  if (own.fast)
    return node.call->polar->sums(own.fast, {span.row, span.rows, span.first, span.last}, weight, weight_stride,
                                  node.sum_row(span.row), node.sum_stride);
  if (own.usual)
    return with_rows(span.rows, [&](auto rows) { polar_usual_sums<S, rows>(node, span, weight, weight_stride); });
  tile_sums<S>(node, span, weight, weight_stride, own.tile, polar_tile<S>);
}

template <class S>
constexpr Layout kPolar{Kind::polar, polar_prepare<S>, polar_scores<S>, polar_sums<S>, polar_tile<S>};

}  // namespace
}  // namespace tersekv
