// Packed tokens as Python objects: `View` is one layout's planes, `Rope` a model's RoPE. They are made once, when a
// page is made or grows; what they are given is checked there, and they keep its tensors.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tensors.h"

namespace tersekv {

constexpr int64_t kByteBlock = 32;  // tokens of a block of signs, polar, sparse and trellis

// More than any model has; sums of a head's products stay in 32 bits where they are integers, and working memory small.
constexpr int64_t kMostChannels = int64_t{1} << 16;
constexpr int64_t kMostHeads = int64_t{1} << 24;
constexpr int64_t kMostBlockTokens = int64_t{1} << 20;

// Tensors that an object reads, and memory of its own.
class Owner {
 public:
  Owner() = default;
  Owner(Owner&&) = default;
  Owner& operator=(Owner&&) = default;
  Owner(const Owner&) = delete;  // what a view points to is in it

  // A dense tensor on the CPU of one of `types`, kept.
  Tensor keep(const std::string& name, nb::handle x, unsigned types);
  Tensor keep_optional(const std::string& name, nb::handle x, unsigned types) {
    return x.is_none() ? Tensor{} : keep(name, x, types);
  }
  void keep_shared(std::shared_ptr<const void> x) { shared_.push_back(std::move(x)); }

  // Memory for `count` elements, which lives as long as the object.
  template <class T>
  T* memory(int64_t count) {
    memory_.push_back(std::make_unique<float[]>(ceil_div(count * static_cast<int64_t>(sizeof(T)), sizeof(float))));
    return reinterpret_cast<T*>(memory_.back().get());
  }

  // Throws where a tensor lies elsewhere than when it was given: its storage was replaced, and the old memory may be
  // gone.
  void check_unmoved() const;

 private:
  struct HeldTensor {
    nb::object tensor;
    uintptr_t address;
  };
  std::vector<HeldTensor> tensors_;
  std::vector<std::shared_ptr<const void>> shared_;
  std::vector<std::unique_ptr<float[]>> memory_;
};

// RoPE of a model's keys: cosines and sines of any position, and the pairs of channels that it rotates.
struct NativeRope {
  Owner owner;
  RopeView rope;  // without places
  int64_t D = 0;
};

// Planes of one layout, or a view made of views.
struct NativeView {
  Owner owner;
  View view;
  int64_t B = 1, H = 0;   // B = 1 serves any batch; H = 0: parts say it
  int side = 0;           // 1: of keys, 2: of values, 0: of either
  bool has_rope = false;  // somewhere in it
  std::vector<nb::object> parts;
  nb::object rope;  // the NativeRope of a view with RoPE

  void check_unmoved() const;
};

void define_views(nb::module_& m);          // operands.cpp
void define_byte_views(nb::module_& m);     // operands_bytes.cpp
void define_trellis_views(nb::module_& m);  // operands_trellis.cpp
void define_rope_views(nb::module_& m);     // operands_rope.cpp

// Stride along the batch: 0 where all batch rows read the same one row.
inline int64_t batch_stride(const Tensor& x) { return x.shape[0] == 1 ? 0 : x.stride[0]; }

// Sets the strides of a view's plane of codes [B, H, N, ...].
template <typename CodesView>
void take_strides(CodesView& v, const Tensor& codes) {
  v.stride_b = batch_stride(codes);
  v.stride_h = codes.stride[1];
  v.stride_n = codes.stride[2];
}

// A view of unpacked tokens [B, H, T, D], whose tensor the caller keeps.
NativeView view_of_tokens(const std::string& name, const Tensor& x);

// Takes B, H and N of a view from its first plane, which has at least `dims` axes [B, H, N, ...].
int64_t take_sizes(NativeView& v, const char* what, const Tensor& plane, int dims);

// Planes of 16-bit elements, [B, H, N, ...]; `sizes` in full.
Plane plane_of(const char* what, const Tensor& x, std::initializer_list<Size> sizes);

// Takes parts of equal T, batch and heads.
void take_parts(NativeView& v, const std::vector<nb::object>& parts);

}  // namespace tersekv
