// A submitted step: the parsed plan with everything it needs copied in, so that a slot may be closed and reused before it runs.
#pragma once
#include <cstdint>
#include <vector>

#include "backend.h"
#include "kv_transfer/stager.h"

namespace ls {

constexpr int32_t kCarryToken = -1;  // in a plan: the token this slot sampled in its row before

struct Step {
  StepBatch batch;
  std::vector<int32_t> tokens;  // all rows' ids; the rows of batch point here
  std::vector<int32_t> pages;   // all rows' block tables
  struct Owner {
    uint64_t serial = 0;     // which opening of the slot: a slot closed meanwhile takes no result
    int32_t carry_row = -1;  // row of the step before whose sample is this row's first token; -1 = all tokens are known
  };
  std::vector<Owner> owners;  // one per row
  std::vector<kv::StageJob> stages;  // pages to stage as the step runs; their tables are in pages
  uint32_t result_words = 0;  // the most that its result can take
};

// Checks all of the plan that needs no sequence: sizes, ranges, floats, ids. A carry may only be the first token of a row. Rows get their
// tokens; pages and owners are the engine's. LS_INVALID names row, field, value and what was expected; `step` is scratch then.
Status parse_plan(const ls_config &config, const int32_t *plan, uint32_t words, Step &step);

// Checks what the backend returned; an error text or empty.
std::string check_output(const ls_config &config, const Step &step, const StepOutput &output);

}  // namespace ls
