// Packed tokens as Python objects. `View` has the tensors of one layout, `Rope` a model's RoPE.
// They are built once, when a page is packed or grows. Their arguments are validated then, and they
// keep references to the tensors.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tensors.h"

namespace tersekv {

constexpr int64_t kByteBlock = 32;  // tokens per block of signs, polar, sparse and trellis

// Upper limits, above any model's sizes. With them integer sums of a head's products fit 32 bits,
// and working memory is small.
constexpr int64_t kMostChannels = int64_t{1} << 16;
constexpr int64_t kMostHeads = int64_t{1} << 24;
constexpr int64_t kMostBlockTokens = int64_t{1} << 20;

// References to the tensors that an object reads, and memory of its own.
class Owner {
 public:
  Owner() = default;
  Owner(Owner&&) = default;
  Owner& operator=(Owner&&) = default;
  Owner(const Owner&) = delete;  // views point into it

  // Return a dense CPU tensor of one of `types`, and keep a reference to it.
  Tensor keep(const std::string& name, nb::handle x, unsigned types);
  Tensor keep_optional(const std::string& name, nb::handle x, unsigned types) {
    return x.is_none() ? Tensor{} : keep(name, x, types);
  }
  void keep_shared(std::shared_ptr<const void> x) { shared_.push_back(std::move(x)); }

  // Return memory for `count` elements that lives as long as the object.
  template <class T>
  T* memory(int64_t count) {
    memory_.push_back(std::make_unique<float[]>(ceil_div(count * static_cast<int64_t>(sizeof(T)), sizeof(float))));
    return reinterpret_cast<T*>(memory_.back().get());
  }

  // Throw Moved if a tensor has another address than at first: its storage was replaced, and the
  // old memory may have been freed.
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

// RoPE of a model's keys: cosines and sines of any position, and the pairs of channels that it
// rotates.
struct NativeRope {
  Owner owner;
  RopeView rope;  // without places
  int64_t D = 0;
};

// Tensors of one layout, or a view composed of views.
struct NativeView {
  Owner owner;
  View view;
  int64_t B = 1, H = 0;   // B = 1: valid for any batch; H = 0: given by the parts
  int side = 0;           // 1: of keys, 2: of values, 0: of either
  bool has_rope = false;  // the view or a part of it
  std::vector<nb::object> parts;
  nb::object rope;  // the NativeRope of a view with RoPE

  void check_unmoved() const;
};

// Return the stride along the batch: 0 if all batch rows share one.
inline int64_t batch_stride(const Tensor& x) { return x.shape[0] == 1 ? 0 : x.stride[0]; }

// Return marks as (bits uint8 [1 or B, H, n], numbers int64 [1 or B, H, 2], ends int64 [B, H] or None), or none for
// None. They must mark the tokens that every head has of the page's. ends: is set to the third, see `Call`.
Marks take_marks(Owner& owner, nb::handle marks, int64_t B, int64_t H, int64_t tokens, const int64_t** ends = nullptr);

// Set the strides of a view's codes [B, H, N, ...].
template <typename CodesView>
void take_strides(CodesView& v, const Tensor& codes) {
  v.stride_b = batch_stride(codes);
  v.stride_h = codes.stride[1];
  v.stride_n = codes.stride[2];
}

// Build a view of unpacked tokens [B, H, T, D]. The caller keeps the tensor alive.
NativeView view_of_tokens(const std::string& name, const Tensor& x);

// Set B and H of a view from its first tensor, which has at least `dims` axes [B, H, N, ...].
// Return N.
int64_t take_sizes(NativeView& v, const char* what, const Tensor& plane, int dims);

// Return a tensor of 16-bit elements, [B, H, N, ...], as a Plane. `sizes`: all of its sizes.
Plane plane_of(const char* what, const Tensor& x, std::initializer_list<Size> sizes);

// Set the parts of a view. They must have equal T, batch and heads.
void take_parts(NativeView& v, const std::vector<nb::object>& parts);

}  // namespace tersekv
