// int16 tables for polar coordinates, with AVX-512.
#include "polar_plan.h"

#include <immintrin.h>

namespace tersekv {
namespace {

void repeated(const float* table, int64_t entries, Shorts& out) {
  for (int64_t i = 0; i < 32; i++) {
    const float x = __builtin_rintf(table[i % entries] * kPolarOne);
    out.entry[i] = static_cast<int16_t>(x > kPolarOne - 1 ? kPolarOne - 1 : x);
  }
}

// Compute the partial scores of a row's pairs for each code of level 1. The squared weights of the
// pairs under a radius add up to 1. The sum of weights times partial scores is therefore at most
// the sum of the norms of each sixteen channels, which is scaled to 64000.
void query_tables(const PolarPlan& plan, const float* cos, const float* sin, const float* query, int64_t row) {
  __m512 most = _mm512_setzero_ps(), wrong = _mm512_setzero_ps();
  for (int64_t d = 0; d < plan.D; d += kLanes) {
    const __m512 q = _mm512_loadu_ps(query + d);
    most = _mm512_max_ps(_mm512_abs_ps(q), most);
    wrong = _mm512_fmadd_ps(q, _mm512_setzero_ps(), wrong);  // infinities and NaN become NaN
  }
  const float largest = _mm512_reduce_max_ps(most), to_one = largest > kPolarLeast ? 1.0f / largest : 0.0f;
  float norms = 0.0f;
  for (int64_t d = 0; d < plan.D; d += kLanes) {
    const __m512 q = _mm512_mul_ps(_mm512_loadu_ps(query + d), _mm512_set1_ps(to_one));
    norms += __builtin_sqrtf(_mm512_reduce_add_ps(_mm512_mul_ps(q, q)));
  }
  const float steps = norms > 2.8f ? 64000.0f / norms : 22900.0f;  // a pair's norm is at most √2
  plan.unit[row] = largest / steps * plan.view->unit / kPolarOne + _mm512_reduce_add_ps(wrong);
  const __m512 inverse = _mm512_set1_ps(to_one * steps), of_cos = _mm512_mul_ps(_mm512_loadu_ps(cos), inverse),
               of_sin = _mm512_mul_ps(_mm512_loadu_ps(sin), inverse);
  for (int64_t d = 0; d < plan.D; d += 2) {
    // Pair 4m + 2s + i of a radius: entries from 16s on of table i of rows 2m and 2m + 1.
    const int64_t pair = d / 2, at = (pair / 4 * 2 + pair % 2) * plan.rows + row;
    const __m512 x =
        _mm512_fmadd_ps(_mm512_set1_ps(query[d]), of_cos, _mm512_mul_ps(_mm512_set1_ps(query[d + 1]), of_sin));
    _mm256_store_si256(reinterpret_cast<__m256i*>(plan.query[at].entry + pair / 2 % 2 * kLanes),
                       _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x)));
  }
}

}  // namespace

const void* make_polar_plan(const PolarSide& side) {
  const PolarView& v = *side.view;
  if (v.levels != 4 || v.bits[0] != 4 || v.bits[1] != 2 || v.bits[2] != 2 || v.bits[3] != 2) return nullptr;
  auto* plan = scratch_of<PolarPlan>();
  const float *cos[4], *sin[4];
  for (int level = 0; level < 4; level++) {
    cos[level] = v.cos[level] + side.b * v.table_stride_b;
    sin[level] = v.sin[level] + side.b * v.table_stride_b;
    for (int i = 0; i < 1 << v.bits[level]; i++)
      if (!(cos[level][i] * cos[level][i] + sin[level][i] * sin[level][i] < 1.001f)) return nullptr;
  }
  *plan = {};
  plan->view = &v;
  plan->angles = v.angles + side.b * v.stride_b + side.h * v.stride_h;
  plan->radii = v.radii.data + side.b * v.radii.stride_b + side.h * v.radii.stride_h;
  plan->D = side.D;
  plan->b = side.b;
  plan->h = side.h;
  plan->rows = side.rows;
  repeated(cos[0], 16, plan->cos);
  repeated(sin[0], 16, plan->sin);
  repeated(cos[1], 4, plan->cos2);
  repeated(sin[1], 4, plan->sin2);
  for (int i = 0; i < 4; i++) {
    const float *third = i % 2 ? sin[2] : cos[2], *fourth = i < 2 ? cos[3] : sin[3];
    float product[16];
    for (int code = 0; code < 16; code++) product[code] = third[code % 4] * fourth[code / 4];
    repeated(product, 16, plan->upper[i]);
  }
  if (side.query) {
    plan->query = scratch_of<Shorts>(side.D / 4 * side.rows);
    plan->unit = scratch(side.rows);
    for (int64_t r = 0; r < side.rows; r++) query_tables(*plan, cos[0], sin[0], side.query + r * side.query_stride, r);
  } else {
    plan->weight = scratch_of<int16_t>(kRowTile * kPolarSumTokens);
    plan->pairs = scratch_of<int16_t>(8 * kPolarSumTokens);
  }
  return plan;
}

}  // namespace tersekv
