#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <new>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace ls::cuda::sim {

Stack::Stack(size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  bytes_ = (bytes + page - 1) / page * page, mapped_ = bytes_ + page;
  void *p = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<char *>(p), low_ = mapping_ + page;
  mprotect(mapping_, page, PROT_NONE);
}

// A fiber never returns, so its frames are marked still; the address may be somebody's memory next.
Stack::~Stack() {
  abandon();
  munmap(mapping_, mapped_);
}

void Stack::abandon() const {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(mapping_, mapped_);
#endif
}

void *Stack::prepare(void (*entry)()) const {
  // As ls_sim_switch leaves a context: six registers, then the address to return to. At entry the stack is 8 off a multiple of 16, as after a call.
  auto *top = reinterpret_cast<uint64_t *>(low_ + bytes_) - 2;
  top[-1] = 0;
  top[-2] = reinterpret_cast<uint64_t>(entry);
  std::memset(top - 8, 0, 6 * sizeof(uint64_t));
  return top - 8;
}

}  // namespace ls::cuda::sim

// rdi: where to keep the old stack pointer, rsi: the new one. Registers a callee must preserve go on the stack.
asm(R"(
.text
.globl ls_sim_switch
.hidden ls_sim_switch
.type ls_sim_switch,@function
ls_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size ls_sim_switch,.-ls_sim_switch
)");
