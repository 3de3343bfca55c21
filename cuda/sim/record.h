// Where simulated kernel launches meet simulated streams.
#pragma once
#include <functional>

#include "../runtime.h"

namespace ls::cuda {

// While `stream` is being captured the work is kept for the graph and true is returned; else false: run it now.
bool sim_record(Stream stream, std::function<void()> work);

// True while kernels are only loaded (OnlyLoad). With LAYERSCALE_SIM_LAZY=1 a launch of a kernel that was never loaded is a fault.
bool sim_only_load(const void *kernel);

}  // namespace ls::cuda
