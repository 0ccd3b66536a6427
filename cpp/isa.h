// The builds of the kernels, and the choice of the one that runs.
#pragma once

#include <string>
#include <vector>

#include "contract.h"

namespace tersekv {

const Kernels& kernels_baseline();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();

GridFn grid_product_baseline(const GridView& view, int rows);
GridFn grid_product_avx2(const GridView& view, int rows);
GridFn grid_product_avx512(const GridView& view, int rows);
GridFn grid_product_vbmi(const GridView& view, int rows);
GridFn grid_product_amx(const GridView& view, int rows);
GridFn grid_product_avx512bf16(const GridView& view, int rows);

// Kernels with integer products; null if the CPU lacks VBMI, VBMI2 or VNNI.
const TrellisKernel* trellis_kernel();
const RopeKernel* rope_kernel();
const PolarKernel* polar_kernel();

struct Isa {
  const Kernels* kernels;
  std::string missing;  // CPU features that are missing; empty if the build runs on this CPU
};

const std::vector<Isa>& isas();  // best first
const Kernels& current();
void set_isa(const std::string& name);  // "auto" or a name in isas(); throws std::invalid_argument

}  // namespace tersekv
