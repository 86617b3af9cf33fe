// Paged attention, decode and prefill alike: a few rows of queries against 64 keys at a time, softmax online (Milakov and
// Gimelshein, 2018), as in FlashAttention. Keys are always taken in the same 64s, counted from position 0, so that a
// row's result depends neither on the rows beside it nor on how its prompt was cut into chunks.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cache.h"
#include "products.h"
#include "types.h"
#if defined(OCTAVO_EXACT)
#include "exact.h"
#endif

namespace octavo::OCTAVO_VARIANT {

// How keys and values of type C are multiplied with queries and weights that are read as `Left`.
template <typename C, typename L>
struct Floats {
  using Cache = C;
  using Left = L;
  static constexpr bool kCoarse = std::is_same_v<C, bf16>;  // whether weights are rounded to few bits
  static constexpr int kHeldSums = kParts > 1 && !std::is_same_v<L, C> ? kSums * 2 / 3 : kSums;
  static constexpr int kRows = kParts == 1 ? kSums / 2 : kHeldSums;
  // Sixteens of a head's values done at a time.
  static constexpr int kColumns = kParts == 1 ? 4 : kHeldSums >= 6 ? 2 : 1;
  template <int count>
  struct Of;
};

constexpr int kTiles = 4;  // of 16 keys
constexpr int kChunk = kTiles * kLanes;
constexpr float kLowest = -3.0e38f;
// What `attend_unit` wants, in floats: outputs of some rows, and their queries as they are read.
constexpr int64_t attention_room(int64_t head_dim) { return 2 * kSums * head_dim; }

// The 16 keys (or values) from a position on, for one KV head; null where no row may look.
template <typename C>
struct Tile {
  const C* keys;
  const C* values;
};

template <>
struct Tile<int8> {
  const int8* keys;
  const int8* values;
  const bf16* key_scales;
  const float* value_scales;
};

// The queries of one sequence and KV head. Row r is query head r % group of the sequence's token r / group; what is beyond
// the last row is that one again. They are of type `dtype`: only what reads and writes them is compiled for each.
struct Rows {
  const Attention& op;
  const void* x;
  void* y;
  int32_t dtype;
  int64_t first_token;  // row of x of the sequence's first token in this step
  int64_t history;      // its position
  int64_t context;      // tokens of the sequence with those of this step
  int64_t kv_head, group, window, last;

  OCTAVO_INLINE int64_t token(int64_t row) const { return std::min(row, last) / group; }
  OCTAVO_INLINE int64_t position(int64_t row) const { return history + token(row); }
  OCTAVO_INLINE int64_t lowest(int64_t row) const {
    const int64_t begin = window ? position(row) + 1 - window : 0;
    return begin > 0 ? begin : 0;
  }
  // The last position that the row sees.
  OCTAVO_INLINE int64_t highest(int64_t row) const {
    if (!op.two_sided) return position(row);
    return window ? std::min(position(row) + window, context) - 1 : context - 1;
  }
  OCTAVO_INLINE int64_t head(int64_t row) const { return kv_head * group + std::min(row, last) % group; }
  // Calls function(the row's query).
  template <typename Function>
  OCTAVO_INLINE void query(int64_t row, Function function) const {
    with_type(dtype, [&](auto t) __attribute__((always_inline)) {
      function((const decltype(t)*)x + (first_token + token(row)) * op.x_stride + head(row) * op.head_dim);
    });
  }
  // Calls function(where its output belongs).
  template <typename Function>
  OCTAVO_INLINE void output(int64_t row, Function function) const {
    with_type(dtype, [&](auto t) __attribute__((always_inline)) {
      function((decltype(t)*)y + (first_token + token(row)) * op.y_stride + head(row) * op.head_dim);
    });
  }
};

// Of `count` queries, one after the other, against `tiles` tiles at once: each operand is loaded for all. Tiles of the next
// chunk are fetched `ahead`, line by line as these are read: blocks lie anywhere, which no prefetcher of the CPU's foresees.
template <typename How, int count, int tiles, typename C = typename How::Cache>
OCTAVO_LOOP void tile_scores(const typename How::Left* queries, const C* const (&keys)[tiles],
                             const C* const (&ahead)[tiles], int64_t head_dim, float* scores) {
  Sums<count, tiles> sums{};
  for (int64_t d = 0; d < head_dim; d += kDepth<C>) {
    each<tiles>(OCTAVO_EACH(t) { __builtin_prefetch(ahead[t] + d * kLanes, 0, 2); });
    add_products<C>(
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

// output += weights x values for `columns` sixteens of the head, over the tokens of the tiles from `from` (of a pair the
// first) to `num_tokens`.
template <typename How, int count, int columns, typename C = typename How::Cache>
OCTAVO_LOOP void add_values(const typename How::Left (*weights)[kChunk], const Tile<C>* tiles, const Tile<C>* ahead,
                            int64_t from, int64_t num_tokens, int64_t head_dim, int64_t column, const float* rescale,
                            float* outputs, int64_t output_stride) {
  constexpr int depth = kDepth<C>;
  Sums<count, columns> sums;
  sums.load(outputs + column, output_stride);
  sums.scale(rescale);
  for (int64_t first = from / kLanes * kLanes; first < num_tokens; first += kLanes) {
    const C* values = tiles[first / kLanes].values;
    if (!values) continue;
    const C* next = ahead[first / kLanes].values ? ahead[first / kLanes].values : values;
    const int64_t tokens = num_tokens - first < kLanes ? num_tokens - first : kLanes;
    int64_t token = from > first ? from - first : 0;
    for (; token + depth <= tokens; token += depth) {
      const int64_t at = token * head_dim + column * depth;
      each<columns>(OCTAVO_EACH(c) { __builtin_prefetch(next + at + c * kLanes * depth, 0, 2); });
      add_products<C>(
          sums, OCTAVO_EACH(r) { return weights[r] + first + token; },
          OCTAVO_EACH(c) { return values + at + c * kLanes * depth; });
    }
    if constexpr (depth == 2) {
      if (token < tokens) {
        alignas(64) C kept[columns][2 * kLanes];
        for (int c = 0; c < columns; c++)
          first_of_pairs(values + token * head_dim + (column + c * kLanes) * depth, kept[c]);
        add_products<C>(
            sums, OCTAVO_EACH(r) { return weights[r] + first + token; }, OCTAVO_EACH(c) { return kept[c]; });
      }
    }
  }
  sums.store(outputs + column, output_stride);
}

// `columns` sixteens at a time as far as the head has as many, of as many rows as leave registers for them; then half as many.
template <typename How, int count, int columns = How::kColumns, int row = 0, typename C = typename How::Cache>
OCTAVO_INLINE void add_all_values(const typename How::Left (*weights)[kChunk], const Tile<C>* tiles,
                                  const Tile<C>* ahead, int64_t from, int64_t num_tokens, int64_t head_dim,
                                  const float* rescale, float* outputs, int64_t first = 0) {
  constexpr int most = How::kHeldSums / columns, some = count - row > most ? most : count - row;
  int64_t column = first;
  for (; column + columns * kLanes <= head_dim; column += columns * kLanes)
    add_values<How, some, columns>(weights + row, tiles, ahead, from, num_tokens, head_dim, column, rescale + row,
                                   outputs + row * head_dim, head_dim);
  if constexpr (row + some < count) {
    add_all_values<How, count, columns, row + some>(weights, tiles, ahead, from, num_tokens, head_dim, rescale, outputs, first);
  } else if constexpr (columns > 1) {
    add_all_values<How, count, columns / 2>(weights, tiles, ahead, from, num_tokens, head_dim, rescale, outputs, column);
  }
}

#if defined(OCTAVO_EXACT)
template <bool coarse>
OCTAVO_INLINE f32x16 power(const f32x16& x) {
  return exact::exp2<coarse>(x);
}
OCTAVO_INLINE f32x16 bounded(const f32x16& x) { return exact::tanh(x); }
#else
template <bool coarse>
OCTAVO_INLINE f32x16 power(const f32x16& x) {
  return exp2<coarse>(x);
}
OCTAVO_INLINE f32x16 bounded(const f32x16& x) { return tanh(x); }
#endif

// Scores of one row, [kChunk], of which it sees those from `from` to `to`, to weights, which store(tile, sixteen of them)
// gets, and their sum; gives the new shift. Scores and shifts are in powers of two.
template <bool coarse, typename Store>
OCTAVO_INLINE float weigh(const Attention& op, int64_t from, int64_t to, const float* scores, float shift, float& mass,
                          Store store_weights) {
  static constexpr int32_t kPlaces[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const i32x16 places = load_as<i32x16>(kPlaces);
  const bool all = from <= 0 && to >= kChunk - 1;
  f32x16 values[kTiles];
  f32x16 peak = broadcast(kLowest);
  for (int t = 0; t < kTiles; t++) {
    f32x16 score = load(scores + t * kLanes) * (op.scale * kLog2E);
    if (op.softcap > 0) score = op.softcap * kLog2E * bounded(score / (op.softcap * kLog2E));
    const i32x16 place = places + t * kLanes;
    const f32x16 seen = select((place >= int32_t(from)) & (place <= int32_t(to)), score, broadcast(-__builtin_inff()));
    values[t] = all ? score : seen;
    peak = vmax(values[t], peak);
  }
  const float next = std::max(shift, largest(peak));
  f32x16 sums{};
  for (int t = 0; t < kTiles; t++) {
    const f32x16 weight = power<coarse>(values[t] - next);
    sums = sums + weight;
    store_weights(t, weight);
  }
  mass = sum(sums);
  return next;
}

// Where the tiles of the chunk from `start` on lie; none where no row from position `begin` to `end` may look.
template <typename C>
OCTAVO_INLINE void find_tiles(const Rows& rows, const GroupStep& step, const LayerCache& cache, const int64_t* table,
                              int64_t start, int64_t begin, int64_t end, Tile<C>* tiles) {
  // Blocks hold whole tiles. Dividing takes long.
  const int64_t* block = table + start / step.block_size;
  int64_t offset = start % step.block_size;
  for (int t = 0; t < kTiles; t++, offset += kLanes) {
    const int64_t token = start + t * kLanes, head_dim = rows.op.head_dim;
    if (offset >= step.block_size) offset -= step.block_size, block++;
    tiles[t] = {};
    if (token >= end || token + kLanes <= begin) continue;
    const int64_t at = *block * cache.block_stride + rows.kv_head * step.block_size * width<C>(head_dim);
    const C* keys = (const C*)cache.keys + at;
    const C* values = (const C*)cache.values + at;
    tiles[t].keys = keys + offset * head_dim;
    tiles[t].values = values + offset * head_dim;
    if constexpr (std::is_same_v<C, int8>) {
      tiles[t].key_scales = key_scales(keys, offset, step.block_size, head_dim);
      tiles[t].value_scales = value_scale(values, offset, step.block_size, head_dim);
    }
  }
}

template <typename T>
OCTAVO_INLINE const T* or_else(const T* one, const T* other) {
  return one ? one : other;
}

template <typename How, int count, typename C = typename How::Cache>
OCTAVO_INLINE void chunk_scores(const typename How::Left* queries, const Tile<C>* tiles, const Tile<C>* ahead,
                                int64_t head_dim, float (*scores)[kChunk]) {
  for (int t = 0; t < kTiles; t++) {
    if (!tiles[t].keys) continue;
    const C* next = or_else(ahead[t].keys, tiles[t].keys);
    if constexpr (count * 2 <= How::kHeldSums) {
      if (t % 2 == 0 && tiles[t + 1].keys) {
        const C* next_second = or_else(ahead[t + 1].keys, tiles[t + 1].keys);
        tile_scores<How, count, 2>(queries, {tiles[t].keys, tiles[t + 1].keys}, {next, next_second}, head_dim,
                                   scores[0] + t * kLanes);
        t++;
        continue;
      }
    }
    tile_scores<How, count, 1>(queries, {tiles[t].keys}, {next}, head_dim, scores[0] + t * kLanes);
  }
}

// Some rows' queries and weights as floats, against keys and values of floats.
template <typename C, typename L>
template <int count>
struct Floats<C, L>::Of {
  L* queries;
  int64_t head_dim;
  alignas(64) L weights[count][kChunk];

  OCTAVO_INLINE void take(const Rows& rows, int64_t first) {
    for (int r = 0; r < count; r++)
      rows.query(first + r, OCTAVO_EACH(query) { round_left<C>(query, queries + r * head_dim, head_dim); });
  }

  OCTAVO_INLINE void score(const Tile<C>* tiles, const Tile<C>* ahead, float (*scores)[kChunk]) {
    chunk_scores<Floats, count>(queries, tiles, ahead, head_dim, scores);
  }

  // The weights of row r for the tile `t`.
  OCTAVO_INLINE void weight(const Tile<C>*, int r, int t, const f32x16& values) {
    store_rounded((C*)nullptr, weights[r] + t * kLanes, values);
  }

  // What all rows see together; then each row the rest of what it sees itself. That others are to see may be infinite, and
  // times a weight of zero no number.
  OCTAVO_INLINE void add(const Tile<C>* tiles, const Tile<C>* ahead, const int64_t* seen, const float* rescale,
                         float* outputs) {
    const int64_t common = seen[0] == seen[count - 1] ? seen[0] : seen[0] / kDepth<C> * kDepth<C>;
    add_all_values<Floats, count>(weights, tiles, ahead, 0, common, head_dim, rescale, outputs);
    if constexpr (count > 1) {
      static constexpr float kSame[kLanes] = {1.0f};
      for (int r = 0; r < count; r++)
        if (seen[r] > common)
          add_all_values<Floats, 1>(weights + r, tiles, ahead, common, seen[r], head_dim, kSame, outputs + r * head_dim);
    }
  }
};

// `count` rows from `first` on. `room`: as `attention_room` says.
template <typename How, int count>
void attend_rows(const Rows& rows, const GroupStep& step, const LayerCache& cache, int64_t sequence, int64_t first,
                 float* room) {
  using C = typename How::Cache;
  const int64_t head_dim = rows.op.head_dim;
  const int64_t* table = step.block_tables + sequence * step.table_stride;
  typename How::template Of<count> how{(typename How::Left*)(room + How::kRows * head_dim), head_dim};
  float shift[count], total[count];
  how.take(rows, first);
  for (int r = 0; r < count; r++) {
    shift[r] = rows.op.sinks ? rows.op.sinks[rows.head(first + r)] * kLog2E : kLowest;
    total[r] = rows.op.sinks ? 1.0f : 0.0f;
  }
  std::memset(room, 0, count * head_dim * sizeof(float));
  int64_t lowest[count], highest[count];
  for (int r = 0; r < count; r++) lowest[r] = rows.lowest(first + r), highest[r] = rows.highest(first + r);
  const int64_t begin = lowest[0], end = highest[count - 1] + 1;
  alignas(64) float scores[count][kChunk];
  alignas(64) float shrink[kLanes] = {};
  int64_t seen[count];  // of the chunk's keys, as far as a row sees
  Tile<C> tiles[kTiles], next_tiles[kTiles];
  find_tiles(rows, step, cache, table, begin / kChunk * kChunk, begin, end, next_tiles);
  for (int64_t start = begin / kChunk * kChunk; start < end; start += kChunk) {
    std::memcpy(tiles, next_tiles, sizeof(tiles));
    find_tiles(rows, step, cache, table, start + kChunk, begin, end, next_tiles);
    how.score(tiles, next_tiles, scores);
    float masses[count];
    for (int r = 0; r < count; r++) {
      const float next = weigh<How::kCoarse>(
          rows.op, lowest[r] - start, highest[r] - start, scores[r], shift[r], masses[r],
          [&](int t, const f32x16& values) __attribute__((always_inline)) { how.weight(tiles, r, t, values); });
      shrink[r] = shift[r] - next;
      shift[r] = next;
    }
    store(shrink, power<false>(load(shrink)));
    for (int r = 0; r < count; r++) total[r] = total[r] * shrink[r] + masses[r];
    for (int r = 0; r < count; r++)
      seen[r] = std::clamp<int64_t>(highest[r] + 1 - start, 0, kChunk);
    how.add(tiles, next_tiles, seen, shrink, room);
  }
  for (int r = 0; r < count; r++)
    rows.output(first + r, OCTAVO_EACH(output) {
      for (int64_t d = 0; d < head_dim; d += kLanes) store(output + d, load(room + r * head_dim + d) / total[r]);
    });
}

using AttendFunction = void (*)(const Rows&, const GroupStep&, const LayerCache&, int64_t, int64_t, float*);

// How many rows are computed where there are `count`: as many as one KV head serves of most models, or all that can be.
constexpr int computed(int count, int most) { return count <= 8 ? count : most; }

template <typename How, size_t... counts>
constexpr auto attend_functions(std::index_sequence<counts...>) {
  return std::array<AttendFunction, sizeof...(counts)>{attend_rows<How, computed(counts + 1, How::kRows)>...};
}

// One unit of a step, all its rows. `room`: as `attention_room` says.
template <typename How>
void attend_unit(const Attention& op, const void* x, void* y, const GroupStep& step, const LayerCache& cache,
                 const Unit& unit, float* room, int32_t dtype) {
  static constexpr auto functions = attend_functions<How>(std::make_index_sequence<How::kRows>{});
  const int64_t first_token = step.first_tokens[unit.sequence], group = op.query_heads / op.kv_heads;
  const int64_t tokens = step.first_tokens[unit.sequence + 1] - first_token, end = unit.last_token * group;
  const int64_t context = step.contexts[unit.sequence], history = context - tokens;
  const Rows rows{op, x, y, dtype, first_token, history, context, unit.kv_head, group, step.window, end - 1};
  for (int64_t row = unit.first_token * rows.group; row < end; row += How::kRows) {
    const int64_t count = std::min<int64_t>(end - row, How::kRows);
    functions[count - 1](rows, step, cache, unit.sequence, row, room);
  }
}

}  // namespace octavo::OCTAVO_VARIANT
