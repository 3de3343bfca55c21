// Tells whether the library has code for a device: every kernel file is compiled for the same architectures.
#pragma once

namespace ls::cuda {

const void *probe_kernel();

}  // namespace ls::cuda
