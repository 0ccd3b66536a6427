// The table of layouts: a row for each `Kind`, in its order. Each build of the kernels has its own.
#pragma once

#include "exact.h"
#include "polar.h"
#include "roped_grid.h"
#include "rotated_mean.h"
#include "scaled.h"
#include "signs.h"
#include "trellis.h"

namespace tersekv {
namespace {  // internal to each build of the kernels

template <class S>
constexpr Layout kLayouts[] = {kExact<S>,  kGrid<S>,  kSigns<S>,   kPolar<S>,   kSparse<S>,      kSum<S>,
                               kConcat<S>, kRoped<S>, kRotated<S>, kTrellis<S>, kRotatedMean<S>, kScaled<S>};

template <class S>
constexpr bool in_order() {
  int i = 0;
  for (const Layout& layout : kLayouts<S>)
    if (static_cast<int>(layout.kind) != i++) return false;
  return i == static_cast<int>(Kind::count);
}

template <class S>
const Layout& layout_of(const Node& node) {
  static_assert(in_order<S>(), "the table has a row for each Kind, in its order");
  return kLayouts<S>[static_cast<int>(node.view->kind)];
}

}  // namespace
}  // namespace tersekv
