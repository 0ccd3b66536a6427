#include "isa.h"

#include "encoders.h"
#include "polar_kernel.h"
#include "rope_kernel.h"
#include "row_product.h"
#include "trellis_kernel.h"

#include <atomic>
#include <stdexcept>
#include <utility>

#if TERSEKV_X86
#include <cpuid.h>
#endif
#if TERSEKV_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tersekv {
namespace {

#if TERSEKV_X86
constexpr unsigned kVbmi = 1u << 1, kVbmi2 = 1u << 6, kVnni = 1u << 11;

bool has(unsigned features) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & features) == features;
}

// cpuid, because not every supported compiler knows these names in __builtin_cpu_supports.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
}

bool has_avx512bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
}

#if TERSEKV_AMX
bool has_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAll) == kAll;
}

// Linux lets a process use the tiles' registers when it asks for them.
bool may_use_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#endif

// Kernels of AVX-512 whose trellis codes, polar coordinates, grids of integers and codes before RoPE are multiplied
// in integers, where the CPU has the instructions.
Kernels with_integers(const char* name) {
  Kernels own = kernels_avx512();
  own.name = name;
  if (const TrellisKernel* integers = trellis_kernel()) own.trellis = integers;
  own.polar = polar_kernel();
  own.rope = rope_kernel();
  if (own.polar) own.grid_product = grid_product_vbmi;
  return own;
}

const Kernels& kernels_avx512vnni() {
  static const Kernels kernels = with_integers("avx512vnni");
  return kernels;
}

// Grids of up to 4 bits and tiles of tokens are multiplied in bfloat16.
const Kernels& kernels_avx512bf16() {
  static const Kernels kernels = [] {
    Kernels own = with_integers("avx512bf16");
    own.ns_per_product = 0.007;
    own.grid_product = grid_product_avx512bf16;
    own.rounds = true;
    own.rounded_rows = &row_product_avx512bf16();
    return own;
  }();
  return kernels;
}

#if TERSEKV_AMX
// Tiles of tokens are multiplied in bfloat16 by AMX, grids of up to 4 bits in integers.
const Kernels& kernels_amx() {
  static const RowProduct rows = [] {
    RowProduct own = row_product_amx();
    own.pack_keys = row_product_avx512bf16().pack_keys;
    own.pack_values = row_product_avx512bf16().pack_values;
    return own;
  }();
  static const Kernels kernels = [] {
    Kernels own = with_integers("amx");
    own.trellis = &trellis_kernel_amx();
    own.grid_product = grid_product_amx;
    own.code_rows = kCodeRows;
    own.rounded_rows = &rows;
    own.registers = &tile_registers_amx();
    return own;
  }();
  return kernels;
}
#endif

std::vector<Isa> detect() {
  std::string avx2, avx512, vnni, bf16;
  const auto need = [](std::string& missing, bool present, const char* name) {
    if (!present) missing += (missing.empty() ? "" : ", ") + std::string(name);
  };
  __builtin_cpu_init();
  need(avx2, __builtin_cpu_supports("avx2"), "avx2");
  need(avx2, __builtin_cpu_supports("fma"), "fma");
  need(avx2, __builtin_cpu_supports("avx") && has_f16c(), "f16c");
  avx512 = avx2;
  need(avx512, __builtin_cpu_supports("bmi2"), "bmi2");
  need(avx512, __builtin_cpu_supports("avx512f"), "avx512f");
  need(avx512, __builtin_cpu_supports("avx512bw"), "avx512bw");
  need(avx512, __builtin_cpu_supports("avx512dq"), "avx512dq");
  need(avx512, __builtin_cpu_supports("avx512vl"), "avx512vl");
  bf16 = vnni = avx512;
  need(bf16, __builtin_cpu_supports("avx512f") && has_avx512bf16(), "avx512_bf16");
  need(vnni, __builtin_cpu_supports("avx512f") && has(kVnni), "avx512_vnni");
  std::vector<Isa> all;
#if TERSEKV_AMX
  std::string amx = vnni;
  need(amx, has_amx(), "amx_tile, amx_bf16, amx_int8");
  need(amx, has(kVbmi | kVbmi2), "avx512_vbmi, avx512_vbmi2");
  need(amx, has_avx512bf16(), "avx512_bf16");
  if (amx.empty()) need(amx, may_use_tiles(), "amx_tile, which this process may not use");
  all.push_back({&kernels_amx(), amx});
#endif
  all.insert(all.end(), {{&kernels_avx512bf16(), bf16}, {&kernels_avx512vnni(), vnni}});
  // Vectors of bfloat16 are multiplied faster than float32 by AMD's CPUs, and half as fast by Intel's.
  if (__builtin_cpu_is("intel")) std::swap(all[all.size() - 2], all.back());
  all.insert(all.end(), {{&kernels_avx512(), avx512}, {&kernels_avx2(), avx2}, {&kernels_baseline(), ""}});
  return all;
}
#else
std::vector<Isa> detect() { return {{&kernels_baseline(), ""}}; }
#endif

const Kernels* best() {
  for (const Isa& isa : isas())
    if (isa.missing.empty()) return isa.kernels;
  return &kernels_baseline();
}

std::atomic<const Kernels*>& selected() {
  static std::atomic<const Kernels*> kernels{best()};
  return kernels;
}

}  // namespace

const std::vector<Isa>& isas() {
  static const std::vector<Isa> all = detect();
  return all;
}

#if TERSEKV_X86
const TrellisKernel* trellis_kernel() { return has(kVbmi | kVbmi2 | kVnni) ? &trellis_kernel_vnni() : nullptr; }
const PolarKernel* polar_kernel() { return has(kVbmi | kVbmi2 | kVnni) ? &polar_kernel_vnni() : nullptr; }
const RopeKernel* rope_kernel() { return has(kVnni) ? &rope_kernel_vnni() : nullptr; }
#endif

const Encoders& encoders() {
#if TERSEKV_X86
  if (&current() == &kernels_avx2()) return encoders_avx2();
  if (&current() != &kernels_baseline()) return encoders_avx512();
#endif
  return encoders_baseline();
}

const Kernels& current() { return *selected().load(std::memory_order_relaxed); }

void set_isa(const std::string& name) {
  if (name == "auto") {
    selected() = best();
    return;
  }
  std::string known = "auto";
  for (const Isa& isa : isas()) {
    known += std::string(", ") + isa.kernels->name;
    if (name != isa.kernels->name) continue;
    if (!isa.missing.empty()) throw std::invalid_argument("isa: " + name + " needs CPU features: " + isa.missing);
    selected() = isa.kernels;
    return;
  }
  throw std::invalid_argument("isa: got " + name + ", this build knows " + known);
}

}  // namespace tersekv
