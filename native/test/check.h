// A tiny test harness: cases register themselves; each prints `ok name` or `not ok name: why`; the last line counts them.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Case {
  std::string name;
  std::function<void()> body;
};
inline std::vector<Case> &cases() {
  static std::vector<Case> all;
  return all;
}
struct Register {
  Register(std::string name, std::function<void()> body) { cases().push_back({std::move(name), std::move(body)}); }
};

[[noreturn]] inline void fail(const char *file, int line, const std::string &what) {
  throw std::runtime_error(std::string(std::strrchr(file, '/') ? std::strrchr(file, '/') + 1 : file) + ":" + std::to_string(line) + ": " + what);
}
template <class T>
std::string show(const T &value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

// Runs the cases whose name contains argv[1] (all without it).
inline int run(int argc, char **argv) {
  int passed = 0, failed = 0;
  for (const Case &c : cases()) {
    if (argc > 1 && c.name.find(argv[1]) == std::string::npos) continue;
    try {
      c.body();
      std::printf("ok %s\n", c.name.c_str());
      ++passed;
    } catch (const std::exception &e) {
      std::printf("not ok %s: %s\n", c.name.c_str(), e.what());
      ++failed;
    }
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed || !passed ? 1 : 0;
}

}  // namespace check

#define CHECK_CAT2(a, b) a##b
#define CHECK_CAT(a, b) CHECK_CAT2(a, b)
#define TEST(name) \
  static void CHECK_CAT(test_, __LINE__)(); \
  static check::Register CHECK_CAT(register_, __LINE__)(name, CHECK_CAT(test_, __LINE__)); \
  static void CHECK_CAT(test_, __LINE__)()
#define CHECK(x) do { if (!(x)) check::fail(__FILE__, __LINE__, "expected " #x); } while (0)
#define CHECK_EQ(a, b) do { auto &&a_ = (a); auto &&b_ = (b); if (!(a_ == b_)) check::fail(__FILE__, __LINE__, std::string(#a " is ") + check::show(a_) + ", expected " + check::show(b_)); } while (0)
#define CHECK_LE(a, b) do { auto &&a_ = (a); auto &&b_ = (b); if (!(a_ <= b_)) check::fail(__FILE__, __LINE__, std::string(#a " is ") + check::show(a_) + ", above " + check::show(b_)); } while (0)
