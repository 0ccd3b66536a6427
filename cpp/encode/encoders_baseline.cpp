#include "encode_bodies.h"

namespace tersekv {

const Encoders& encoders_baseline() { return kEncoders; }

}  // namespace tersekv
