// Where simulated kernel launches meet simulated streams.
#pragma once
#include <functional>

#include "../runtime.h"

namespace ls::cuda {

// While `stream` is being captured the work is kept for the graph and true is returned; else false: run it now.
bool sim_record(Stream stream, std::function<void()> work);

}  // namespace ls::cuda
