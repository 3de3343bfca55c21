// main() of all tests in one program, for a machine with a GPU: a case a process, since a fault of a kernel ends whatever else the process could still do.
//   --list        the name of every case, one a line
//   NAME          that case alone
#include <string>

#include "guarded.h"

int main(int argc, char **argv) {
  if (argc != 2) {
    std::fprintf(stderr, "error: expected --list or the name of a case, got %d words\n", argc - 1);
    return 2;
  }
  const std::string wanted = argv[1];
  for (const check::Case &c : check::cases()) {
    if (wanted == "--list") std::printf("%s\n", c.name.c_str());
    if (wanted != c.name) continue;
    std::string why;
    try {
      c.body();
    } catch (const std::exception &error) {
      why = error.what();
    }
#ifdef LS_TEST_GPU
    if (const int count = ls::cuda::overruns; why.empty() && count > 0) why = std::to_string(count) + " buffers were written to beyond their ends";
#endif
    std::printf("%s %s%s%s\n", why.empty() ? "ok" : "not ok", c.name.c_str(), why.empty() ? "" : ": ", why.c_str());
    return why.empty() ? 0 : 1;
  }
  if (wanted == "--list") return 0;
  std::fprintf(stderr, "error: no case has the name \"%s\"\n", argv[1]);
  return 2;
}
