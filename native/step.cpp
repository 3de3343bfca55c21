#include "step.h"

#include <bit>
#include <cmath>

namespace ls {
namespace {

Status invalid(std::string text) { return Status::fail(LS_INVALID, std::move(text)); }

Status header_error(const char *field, int64_t value, const std::string &expected) {
  return invalid("plan." + std::string(field) + " is " + std::to_string(value) + ", expected " + expected);
}

Status row_error(size_t row, const char *field, const std::string &value, const std::string &expected) {
  return invalid("row " + std::to_string(row) + ": " + field + " is " + value + ", expected " + expected);
}

}  // namespace

Status parse_plan(const ls_config &config, const int32_t *plan, uint32_t words, Step &step) {
  if (plan == nullptr) return invalid("plan is NULL");
  if (words < LS_PLAN_HEADER_WORDS) return header_error("words", words, "at least " + std::to_string(LS_PLAN_HEADER_WORDS));
  const int64_t rows = plan[0], tokens = plan[1];
  if (rows < 1 || rows > config.max_seqs) return header_error("rows", rows, "1.." + std::to_string(config.max_seqs));
  if (tokens < rows || tokens > config.max_batch_tokens)
    return header_error("tokens", tokens, std::to_string(rows) + ".." + std::to_string(config.max_batch_tokens) + " (one per row at least, max_batch_tokens at most)");
  for (int i = 3; i < LS_PLAN_HEADER_WORDS; ++i)
    if (plan[i] != 0) return header_error(("word " + std::to_string(i)).c_str(), plan[i], "0");
  const int64_t expected_words = LS_PLAN_HEADER_WORDS + rows * LS_PLAN_ROW_WORDS + tokens;
  if (words != expected_words)
    return header_error("words", words, std::to_string(expected_words) + " for " + std::to_string(rows) + " rows and " + std::to_string(tokens) + " tokens");

  step.batch.step = static_cast<uint32_t>(plan[2]);
  step.batch.tokens = static_cast<uint32_t>(tokens);
  const int32_t *first_token = plan + LS_PLAN_HEADER_WORDS + rows * LS_PLAN_ROW_WORDS;
  step.tokens.assign(first_token, first_token + tokens);
  step.batch.rows.assign(static_cast<size_t>(rows), StepRow{});
  step.result_words = LS_RESULT_HEADER_WORDS;

  int64_t used = 0;
  for (size_t i = 0; i < static_cast<size_t>(rows); ++i) {
    const int32_t *w = plan + LS_PLAN_HEADER_WORDS + i * LS_PLAN_ROW_WORDS;
    StepRow &row = step.batch.rows[i];
    const int64_t start = w[1], len = w[2];
    const uint32_t flags = static_cast<uint32_t>(w[3]) & 0xff, n_logprobs = static_cast<uint32_t>(w[3]) >> 8;
    row.slot = w[0];
    row.temperature = std::bit_cast<float>(w[4]);
    row.top_p = std::bit_cast<float>(w[5]);
    row.seed = static_cast<uint64_t>(static_cast<uint32_t>(w[6])) | static_cast<uint64_t>(static_cast<uint32_t>(w[7])) << 32;
    if (row.slot < 0 || static_cast<uint32_t>(row.slot) >= config.max_seqs)
      return row_error(i, "slot", std::to_string(row.slot), "0.." + std::to_string(config.max_seqs - 1));
    if (len < 1 || len > tokens - used) return row_error(i, "len", std::to_string(len), "1.." + std::to_string(tokens - used));
    if (start < 0 || start + len > config.max_context)
      return row_error(i, "start + len", std::to_string(start) + " + " + std::to_string(len), "0.." + std::to_string(config.max_context) + " (max_context)");
    if ((flags & ~LS_ROW_SAMPLE) != 0) return row_error(i, "flags", std::to_string(flags), "0 or LS_ROW_SAMPLE");
    if (n_logprobs > LS_MAX_LOGPROBS) return row_error(i, "n_logprobs", std::to_string(n_logprobs), "0.." + std::to_string(LS_MAX_LOGPROBS));
    if (!std::isfinite(row.temperature) || row.temperature < 0) return row_error(i, "temperature", std::to_string(row.temperature), "a finite number >= 0");
    if (!(row.top_p > 0 && row.top_p <= 1)) return row_error(i, "top_p", std::to_string(row.top_p), "a number in (0, 1]");
    row.start = static_cast<uint32_t>(start);
    row.len = static_cast<uint32_t>(len);
    row.sample = (flags & LS_ROW_SAMPLE) != 0;
    row.n_logprobs = row.sample ? n_logprobs : 0;
    row.tokens = step.tokens.data() + used;
    for (uint32_t t = 0; t < row.len; ++t) {
      const int32_t token = row.tokens[t];
      if (token == kCarryToken && t == 0) continue;
      if (token < 0 || static_cast<uint32_t>(token) >= config.vocab)
        return row_error(i, ("token " + std::to_string(t)).c_str(), std::to_string(token), "0.." + std::to_string(config.vocab - 1) + (t == 0 ? ", or -1 to carry" : " (only a row's first token may be -1)"));
    }
    used += len;
    step.result_words += LS_RESULT_ROW_WORDS + 2 * row.n_logprobs;
  }
  if (used != tokens) return header_error("tokens", tokens, "the sum of all len, " + std::to_string(used));
  return Status::good();
}

std::string check_output(const ls_config &config, const Step &step, const StepOutput &output) {
  const std::vector<StepRow> &rows = step.batch.rows;
  if (output.rows.size() != rows.size()) return "the device returned " + std::to_string(output.rows.size()) + " rows, expected " + std::to_string(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!rows[i].sample) continue;
    const RowOutput &out = output.rows[i];
    const std::string name = "the device returned for row " + std::to_string(i) + " ";
    if (out.token < 0 || static_cast<uint32_t>(out.token) >= config.vocab)
      return name + "token " + std::to_string(out.token) + ", outside the vocabulary of " + std::to_string(config.vocab);
    if (out.top.size() > rows[i].n_logprobs) return name + std::to_string(out.top.size()) + " alternatives, asked for " + std::to_string(rows[i].n_logprobs);
    for (const auto &[token, logprob] : out.top)
      if (token < 0 || static_cast<uint32_t>(token) >= config.vocab) return name + "alternative " + std::to_string(token) + ", outside the vocabulary of " + std::to_string(config.vocab);
  }
  return {};
}

}  // namespace ls
