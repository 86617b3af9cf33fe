// What a step's attention is cut into, and which blocks it touches: once per step and KV group.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "types.h"

namespace octavo {
namespace {

struct Piece {
  int64_t sequence, first_token, last_token, work;
};

std::vector<Piece> pieces(const GroupStep& step, int64_t sequences, int64_t unit_tokens) {
  std::vector<Piece> result;
  for (int64_t s = 0; s < sequences; s++) {
    const int64_t tokens = step.first_tokens[s + 1] - step.first_tokens[s], history = step.contexts[s] - tokens;
    for (int64_t first = 0; first < tokens; first += unit_tokens) {
      const int64_t last = std::min(first + unit_tokens, tokens);
      result.push_back({s, first, last, (last - first) * (history + last)});
    }
  }
  // Most work first; equal ones stay side by side with their neighbours.
  std::stable_sort(result.begin(), result.end(), [](const Piece& a, const Piece& b) { return a.work > b.work; });
  return result;
}

}  // namespace
}  // namespace octavo

// Writes the units of `step`, one for each KV head and every `unit_tokens` tokens of a sequence, to `units`, and the lowest
// and the largest id of the blocks that are read or written to `blocks`.
extern "C" __attribute__((visibility("default"))) void octavo_plan(const octavo::GroupStep* step, int64_t sequences,
                                                                   int64_t kv_heads, int64_t unit_tokens,
                                                                   octavo::Unit* units, int64_t* blocks) {
  using namespace octavo;
  for (const Piece& piece : pieces(*step, sequences, unit_tokens))
    for (int64_t head = 0; head < kv_heads; head++)
      *units++ = {int32_t(piece.sequence), int32_t(head), int32_t(piece.first_token), int32_t(piece.last_token)};
  int64_t lowest = INT64_MAX, largest = INT64_MIN;
  const auto touch = [&](int64_t block) { lowest = std::min(lowest, block), largest = std::max(largest, block); };
  for (int64_t s = 0; s < sequences; s++) {
    const int64_t position = step->contexts[s] - (step->first_tokens[s + 1] - step->first_tokens[s]);
    const int64_t begin = step->window ? std::max<int64_t>(position + 1 - step->window, 0) : 0;
    for (int64_t block = begin / step->block_size; block * step->block_size < step->contexts[s]; block++)
      touch(step->block_tables[s * step->table_stride + block]);
  }
  for (int64_t token = 0; token < step->first_tokens[sequences]; token++)
    touch(step->slots[token] < 0 ? -1 : step->slots[token] / step->block_size);
  blocks[0] = lowest, blocks[1] = largest;
}
