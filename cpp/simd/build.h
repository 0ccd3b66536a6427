// The instruction set that this file is compiled for. CMakeLists.txt defines TERSEKV_ISA as its
// name, which is the suffix of function names, and the macro that is tested here.
#pragma once

#if TERSEKV_avx512bf16
#include "bytes_avx512.h"
#include "simd_avx512bf16.h"
#elif TERSEKV_vbmi
#include "simd_vbmi.h"
#elif TERSEKV_amx
#include "simd_amx.h"
#elif TERSEKV_avx512
#include "bytes_avx512.h"
#elif TERSEKV_avx2
#include "bytes_avx2.h"
#else
#include "bytes_baseline.h"
#endif

namespace tersekv {
#if TERSEKV_avx512bf16
using Lanes = Avx512Bf16;
#elif TERSEKV_vbmi
using Lanes = Avx512Vbmi;
#elif TERSEKV_amx
using Lanes = Avx512Amx;
#elif TERSEKV_avx512
using Lanes = Avx512Bytes;
#elif TERSEKV_avx2
using Lanes = Avx2Bytes;
#else
using Lanes = BaselineBytes;
#endif
}  // namespace tersekv

#define TERSEKV_JOIN(name, isa) name##_##isa
#define TERSEKV_NAMED(name, isa) TERSEKV_JOIN(name, isa)
#define TERSEKV_BUILD(name) TERSEKV_NAMED(name, TERSEKV_ISA)
