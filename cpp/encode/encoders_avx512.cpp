#include "encode_bodies.h"

namespace tersekv {

const Encoders& encoders_avx512() { return kEncoders; }

}  // namespace tersekv
