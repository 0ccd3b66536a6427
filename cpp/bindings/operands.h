// From Python to the kernels' structs: tensors arrive as (address, shape, strides) and are checked against the
// contract.
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

// The views of a call, which live as long as this object.
class Operands {
 public:
  Operands(int64_t B, int64_t H) : B_(B), H_(H) {}

  // A view packed by tersekv.kernels.cpu.pack: (kind, ...). D: channels it must have, or -1.
  const View* read(const char* name, nb::handle packed, int64_t D);

 private:
  struct Index {
    bool given = false;
    const int64_t* data = nullptr;
    int64_t b = 0, h = 0, n = 0, count = 0;
  };

  View parse(const std::string& name, nb::handle packed);
  void parse_exact(View& v, const std::string& name, nb::handle packed);
  void parse_grid(View& v, const std::string& name, nb::handle packed);
  void parse_signs(View& v, const std::string& name, nb::handle packed);
  void parse_polar(View& v, const std::string& name, nb::handle packed);
  void parse_sparse(View& v, const std::string& name, nb::handle packed);
  void parse_trellis(View& v, const std::string& name, nb::handle packed);
  void parse_turned(View& v, const std::string& name, nb::handle packed);
  void parse_turns(View& v, const std::string& name, const Tensor& turns);
  void parse_steps(RopeView& rope, const std::string& name, nb::handle packed);
  void turned_columns(RopeView& rope, int64_t D);
  void parse_rope(View& v, const std::string& name, nb::handle packed, Py_ssize_t first);
  void parse_roped(View& v, const std::string& name, nb::handle packed);
  void parse_rotated(View& v, const std::string& name, nb::handle packed);
  void parse_parts(View& v, const std::string& name, nb::handle packed, Py_ssize_t first, int64_t count);
  void polar_tables(PolarView& v, const std::string& name, nb::handle packed);
  Index channel_index(const std::string& name, const Tensor& x, int64_t N, int64_t n, int64_t channels) const;
  Plane plane(const std::string& name, const char* what, const Tensor& x, std::initializer_list<Size> sizes);

  int depth_ = 0, ropes_ = 0;
  bool tiled_ = false;  // parts of a view that reads tiles
  std::vector<std::unique_ptr<float[]>> tables_;
  int64_t B_, H_;
  std::vector<std::unique_ptr<View[]>> views_;
};

}  // namespace tersekv
