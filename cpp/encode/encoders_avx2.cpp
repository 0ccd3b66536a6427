#include "encode_bodies.h"

namespace tersekv {

const Encoders& encoders_avx2() { return kEncoders; }

}  // namespace tersekv
