// Paged attention, decode and prefill alike: a few rows of queries against 64 keys at a time, softmax online (Milakov and
// Gimelshein, 2018), as in FlashAttention. Keys are always taken in the same 64s, counted from position 0, so that a
// row's result depends neither on the rows beside it nor on how its prompt was cut into chunks.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cache.h"
#include "products.h"
#include "types.h"

namespace octavo::OCTAVO_VARIANT {

template <typename T>
constexpr int kAttentionRows = kParts == 1 ? kSums / 2 : kHeld<T>;
// Sixteens of a head's values done at a time.
template <typename T>
constexpr int kColumns = kParts == 1 ? 4 : kHeld<T> >= 6 ? 2 : 1;
constexpr int kTiles = 4;  // of 16 keys
constexpr int kChunk = kTiles * kLanes;
constexpr float kLowest = -3.0e38f;
// What `attend_rows` wants, in floats: its outputs, and its queries as `Left`.
template <typename T>
constexpr int64_t attention_room(int64_t head_dim) {
  return 2 * kAttentionRows<T> * head_dim;
}

// The 16 keys (or values) from a position on, for one KV head; null where no row may look.
template <typename T>
struct Tile {
  const T* keys;
  const T* values;
};

// The queries of one sequence and KV head. Row r is query head r % group of the sequence's token r / group.
template <typename T>
struct Rows {
  const Attention& op;
  const T* x;
  T* y;
  int64_t first_token;  // row of x of the sequence's first token in this step
  int64_t history;      // its position
  int64_t kv_head, group, window;

  OCTAVO_INLINE int64_t position(int64_t row) const { return history + row / group; }
  OCTAVO_INLINE int64_t lowest(int64_t row) const {
    const int64_t begin = window ? position(row) + 1 - window : 0;
    return begin > 0 ? begin : 0;
  }
  OCTAVO_INLINE int64_t head(int64_t row) const { return kv_head * group + row % group; }
  OCTAVO_INLINE const T* query(int64_t row) const {
    return x + (first_token + row / group) * op.x_stride + head(row) * op.head_dim;
  }
  OCTAVO_INLINE T* output(int64_t row) const {
    return y + (first_token + row / group) * op.y_stride + head(row) * op.head_dim;
  }
};

// Of `count` queries, one after the other, against `tiles` tiles at once: each operand is loaded for all. Tiles of the next
// chunk are fetched `ahead`, line by line as these are read: blocks lie anywhere, which no prefetcher of the CPU's foresees.
template <typename T, int count, int tiles>
OCTAVO_LOOP void tile_scores(const Left<T>* queries, const T* const (&keys)[tiles], const T* const (&ahead)[tiles],
                               int64_t head_dim, float* scores) {
  Sums<count, tiles> sums{};
  for (int64_t d = 0; d < head_dim; d += kDepth<T>) {
    each<tiles>(OCTAVO_EACH(t) { __builtin_prefetch(ahead[t] + d * kLanes, 0, 2); });
    add_products<T>(
        sums, OCTAVO_EACH(r) { return queries + r * head_dim + d; }, OCTAVO_EACH(t) { return keys[t] + d * kLanes; });
  }
  sums.store(scores, kChunk);
}

// The first of each pair of values, beside zeros: a slot that was never written may hold anything, and a NaN times a weight
// of zero would still be one.
OCTAVO_INLINE void first_of_pairs(const bf16* pairs, bf16* to) {
  const u32x16 kept = load_as<u32x16>(pairs) & 0xffffu;
  store_bytes(to, kept);
}

// output += weights x values for `columns` sixteens of the head, over the tokens of the tiles.
template <typename T, int count, int columns>
OCTAVO_LOOP void add_values(const Left<T> (*weights)[kChunk], const Tile<T>* tiles, const Tile<T>* ahead,
                              int64_t num_tokens, int64_t head_dim, int64_t column, const float* rescale, float* outputs,
                              int64_t output_stride) {
  constexpr int depth = kDepth<T>;
  Sums<count, columns> sums;
  sums.load(outputs + column, output_stride);
  sums.scale(rescale);
  for (int64_t first = 0; first < num_tokens; first += kLanes) {
    const T* values = tiles[first / kLanes].values;
    if (!values) continue;
    const T* next = ahead[first / kLanes].values ? ahead[first / kLanes].values : values;
    const int64_t tokens = num_tokens - first < kLanes ? num_tokens - first : kLanes;
    int64_t token = 0;
    for (; token + depth <= tokens; token += depth) {
      const int64_t at = token * head_dim + column * depth;
      each<columns>(OCTAVO_EACH(c) { __builtin_prefetch(next + at + c * kLanes * depth, 0, 2); });
      add_products<T>(
          sums, OCTAVO_EACH(r) { return weights[r] + first + token; },
          OCTAVO_EACH(c) { return values + at + c * kLanes * depth; });
    }
    if constexpr (depth == 2) {
      if (token < tokens) {
        alignas(64) T kept[columns][2 * kLanes];
        for (int c = 0; c < columns; c++)
          first_of_pairs(values + token * head_dim + (column + c * kLanes) * depth, kept[c]);
        add_products<T>(
            sums, OCTAVO_EACH(r) { return weights[r] + first + token; }, OCTAVO_EACH(c) { return kept[c]; });
      }
    }
  }
  sums.store(outputs + column, output_stride);
}

// As many rows at a time as leave registers for the columns.
template <typename T, int count, int row = 0>
OCTAVO_INLINE void add_all_values(const Left<T> (*weights)[kChunk], const Tile<T>* tiles, const Tile<T>* ahead,
                                  int64_t num_tokens, int64_t head_dim, const float* rescale, float* outputs) {
  constexpr int most = kHeld<T> / kColumns<T>, some = count - row > most ? most : count - row;
  float* at = outputs + row * head_dim;
  int64_t column = 0;
  for (; column + kColumns<T> * kLanes <= head_dim; column += kColumns<T> * kLanes)
    add_values<T, some, kColumns<T>>(weights + row, tiles, ahead, num_tokens, head_dim, column, rescale + row, at, head_dim);
  for (; column < head_dim; column += kLanes)
    add_values<T, some, 1>(weights + row, tiles, ahead, num_tokens, head_dim, column, rescale + row, at, head_dim);
  if constexpr (row + some < count)
    add_all_values<T, count, row + some>(weights, tiles, ahead, num_tokens, head_dim, rescale, outputs);
}

// Scores of one row, [kChunk] from position `start` on, to weights and their sum; gives the new shift. Scores and shifts
// are in powers of two.
template <typename T>
OCTAVO_INLINE float weigh(const Rows<T>& rows, int64_t row, int64_t start, const float* scores, Left<T>* weights, float shift,
                          float& mass) {
  static constexpr int32_t kPlaces[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const i32x16 places = load_as<i32x16>(kPlaces);
  const int64_t from = rows.lowest(row) - start, to = rows.position(row) - start;
  const bool all = from <= 0 && to >= kChunk - 1;
  f32x16 values[kTiles];
  f32x16 peak = broadcast(kLowest);
  for (int t = 0; t < kTiles; t++) {
    f32x16 score = load(scores + t * kLanes) * (rows.op.scale * kLog2E);
    if (rows.op.softcap > 0) score = rows.op.softcap * kLog2E * tanh(score / (rows.op.softcap * kLog2E));
    const i32x16 place = places + t * kLanes;
    const f32x16 seen = select((place >= int32_t(from)) & (place <= int32_t(to)), score, broadcast(-__builtin_inff()));
    values[t] = all ? score : seen;
    peak = vmax(values[t], peak);
  }
  const float next = std::max(shift, largest(peak));
  f32x16 sums{};
  for (int t = 0; t < kTiles; t++) {
    const f32x16 weight = exp2<std::is_same_v<T, bf16>>(values[t] - next);
    sums = sums + weight;
    store_rounded((T*)nullptr, weights + t * kLanes, weight);
  }
  mass = sum(sums);
  return next;
}

// Where the tiles of the chunk from `start` on lie; none where no row from position `begin` to `end` may look.
template <typename T>
OCTAVO_INLINE void find_tiles(const Rows<T>& rows, const GroupStep& step, const LayerCache& cache, const int64_t* table,
                              int64_t start, int64_t begin, int64_t end, Tile<T>* tiles) {
  for (int t = 0; t < kTiles; t++) {
    const int64_t token = start + t * kLanes;
    tiles[t] = {nullptr, nullptr};
    if (token >= end || token + kLanes <= begin) continue;
    const int64_t block = table[token / step.block_size], offset = token % step.block_size;
    const int64_t at = block * cache.block_stride + (rows.kv_head * step.block_size + offset) * rows.op.head_dim;
    tiles[t] = {(const T*)cache.keys + at, (const T*)cache.values + at};
  }
}

template <typename T>
OCTAVO_INLINE const T* or_else(const T* one, const T* other) {
  return one ? one : other;
}

template <typename T, int count>
OCTAVO_INLINE void chunk_scores(const Left<T>* queries, const Tile<T>* tiles, const Tile<T>* ahead, int64_t head_dim,
                                float (*scores)[kChunk]) {
  for (int t = 0; t < kTiles; t++) {
    if (!tiles[t].keys) continue;
    const T* next = or_else(ahead[t].keys, tiles[t].keys);
    if constexpr (count * 2 <= kHeld<T>) {
      if (t % 2 == 0 && tiles[t + 1].keys) {
        const T* next_second = or_else(ahead[t + 1].keys, tiles[t + 1].keys);
        tile_scores<T, count, 2>(queries, {tiles[t].keys, tiles[t + 1].keys}, {next, next_second}, head_dim,
                                 scores[0] + t * kLanes);
        t++;
        continue;
      }
    }
    tile_scores<T, count, 1>(queries, {tiles[t].keys}, {next}, head_dim, scores[0] + t * kLanes);
  }
}

// `count` rows from `first` on. `room`: as `attention_room` says.
template <typename T, int count>
void attend_rows(const Rows<T>& rows, const GroupStep& step, const LayerCache& cache, int64_t sequence, int64_t first,
                 float* room) {
  const int64_t head_dim = rows.op.head_dim;
  const int64_t* table = step.block_tables + sequence * step.table_stride;
  Left<T>* queries = (Left<T>*)(room + kAttentionRows<T> * head_dim);
  float shift[count], total[count];
  for (int r = 0; r < count; r++) {
    copy_left(rows.query(first + r), queries + r * head_dim, head_dim);
    shift[r] = rows.op.sinks ? rows.op.sinks[rows.head(first + r)] * kLog2E : kLowest;
    total[r] = rows.op.sinks ? 1.0f : 0.0f;
  }
  std::memset(room, 0, count * head_dim * sizeof(float));
  const int64_t begin = rows.lowest(first), end = rows.position(first + count - 1) + 1;
  alignas(64) float scores[count][kChunk];
  alignas(64) Left<T> weights[count][kChunk];
  alignas(64) float shrink[kLanes] = {};
  Tile<T> tiles[kTiles], next_tiles[kTiles];
  find_tiles(rows, step, cache, table, begin / kChunk * kChunk, begin, end, next_tiles);
  for (int64_t start = begin / kChunk * kChunk; start < end; start += kChunk) {
    std::memcpy(tiles, next_tiles, sizeof(tiles));
    find_tiles(rows, step, cache, table, start + kChunk, begin, end, next_tiles);
    chunk_scores<T, count>(queries, tiles, next_tiles, head_dim, scores);
    float masses[count];
    for (int r = 0; r < count; r++) {
      const float next = weigh(rows, first + r, start, scores[r], weights[r], shift[r], masses[r]);
      shrink[r] = shift[r] - next;
      shift[r] = next;
    }
    store(shrink, exp2<false>(load(shrink)));
    for (int r = 0; r < count; r++) total[r] = total[r] * shrink[r] + masses[r];
    add_all_values<T, count>(weights, tiles, next_tiles, std::min<int64_t>(end - start, kChunk), head_dim, shrink, room);
  }
  for (int r = 0; r < count; r++) {
    T* output = rows.output(first + r);
    for (int64_t d = 0; d < head_dim; d += kLanes) store(output + d, load(room + r * head_dim + d) / total[r]);
  }
}

template <typename T>
using AttendFunction = void (*)(const Rows<T>&, const GroupStep&, const LayerCache&, int64_t, int64_t, float*);

template <typename T, size_t... counts>
constexpr auto attend_functions(std::index_sequence<counts...>) {
  return std::array<AttendFunction<T>, sizeof...(counts)>{attend_rows<T, int(counts) + 1>...};
}

// One unit of a step, all its rows. `room`: as `attention_room` says.
template <typename T>
void attend_unit(const Attention& op, const void* x, void* y, const GroupStep& step, const LayerCache& cache,
                 const Unit& unit, float* room) {
  static constexpr auto functions = attend_functions<T>(std::make_index_sequence<kAttentionRows<T>>{});
  const int64_t first_token = step.first_tokens[unit.sequence];
  const int64_t tokens = step.first_tokens[unit.sequence + 1] - first_token;
  const Rows<T> rows{op,           (const T*)x,
                     (T*)y,        first_token,
                     step.contexts[unit.sequence] - tokens, unit.kv_head,
                     op.query_heads / op.kv_heads,          step.window};
  const int64_t end = unit.last_token * rows.group;
  for (int64_t row = unit.first_token * rows.group; row < end; row += kAttentionRows<T>) {
    const int64_t count = std::min<int64_t>(end - row, kAttentionRows<T>);
    functions[count - 1](rows, step, cache, unit.sequence, row, room);
  }
}

}  // namespace octavo::OCTAVO_VARIANT
