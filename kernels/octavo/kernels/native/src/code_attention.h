// Attention over keys and values of 8 bits: scores and values are sums of whole numbers, to which scales come afterwards.
#pragma once

#include "attention.h"

namespace octavo::OCTAVO_VARIANT {

struct CodeDots {
  using Cache = int8;
  using Left = int32_t;
  static constexpr bool kCoarse = true;
  static constexpr int kRows = kParts == 1 ? kSums / 2 : kSums;
  // Rows whose scores are computed at a time, with two tiles where registers allow it: beside their sums of whole numbers
  // these hold those of floats.
  static constexpr int kScoreRows = kParts == 1 ? 4 : kParts == 2 ? 3 : 1;
  static constexpr int kTwoTiles = kParts == 1 ? kScoreRows : kScoreRows / 2;
  template <int count>
  struct Of;
};

// Of `count` queries, one after the other, against `tiles` tiles at once, group by group of their elements. `starts` are
// what the keys' offset takes away, [count][groups].
template <int count, int tiles>
OCTAVO_LOOP void code_scores(const int32_t* queries, const int32_t* starts, const Tile<int8>* at, const Tile<int8>* ahead,
                             int64_t head_dim, const float* factors, float* scores) {
  const int64_t groups = code_groups(head_dim);
  const uint8_t *keys[tiles], *next[tiles];
  for (int t = 0; t < tiles; t++) {
    keys[t] = (const uint8_t*)at[t].keys, next[t] = (const uint8_t*)or_else(ahead[t].keys, at[t].keys);
    __builtin_prefetch(or_else(ahead[t].key_scales, at[t].key_scales), 0, 2);
  }
  Sums<count, tiles> totals;
  totals.clear();
  for (int64_t group = 0; group < groups; group++) {
    const int64_t end = std::min(head_dim, (group + 1) * kCodeGroup);
    DotSums<Kept::kKeys, count, tiles> sums;
    sums.start(starts + group, groups);
    for (int64_t d = group * kCodeGroup; d < end; d += 4) {
      each<tiles>(OCTAVO_EACH(t) { __builtin_prefetch(next[t] + d * kLanes, 0, 2); });
      add_dots<Kept::kKeys>(
          sums, [&](auto r, auto which) __attribute__((always_inline)) { return queries + r * head_dim + word_at(d / 4, which); },
          OCTAVO_EACH(t) { return keys[t] + d * kLanes; });
    }
    each<tiles>(OCTAVO_EACH(t) {
      alignas(64) float scales[kLanes];
      store(scales, load(at[t].key_scales + group * kLanes));
      each<kParts>(OCTAVO_EACH(p) {
        constexpr int part = t * kParts + p;
        const f32xr scale = load_as<f32xr>(scales + p * kRegisterLanes);
        each<count>(OCTAVO_EACH(r) {
          const f32xr product = sums.template total<r, part>() * scale;
          totals.parts[r][part] = totals.parts[r][part] + product;
        });
      });
    });
  }
  totals.scale(factors);
  totals.store(scores, kChunk);
}

// outputs = outputs * rescale + weights x values for `columns` sixteens of the head, over the tokens of the tiles.
template <int count, int columns>
OCTAVO_LOOP void add_code_values(const int32_t (*weights)[kChunk], const Tile<int8>* tiles, const Tile<int8>* ahead,
                                 int64_t num_tokens, int64_t head_dim, int64_t column, const float* rescale,
                                 const float* factors, float* outputs) {
  DotSums<Kept::kValues, count, columns> sums;
  sums.clear();
  for (int64_t first = 0; first < num_tokens; first += kLanes) {
    const uint8_t* values = (const uint8_t*)tiles[first / kLanes].values;
    if (!values) continue;
    const uint8_t* next = (const uint8_t*)or_else(ahead[first / kLanes].values, tiles[first / kLanes].values);
    const int64_t tokens = num_tokens - first < kLanes ? num_tokens - first : kLanes;
    for (int64_t token = 0; token < tokens; token += 4) {
      const int64_t at = token * head_dim + column * 4;
      each<columns>(OCTAVO_EACH(c) { __builtin_prefetch(next + at + c * kLanes * 4, 0, 2); });
      add_dots<Kept::kValues>(
          sums, [&](auto r, auto which) __attribute__((always_inline)) { return weights[r] + first + word_at(token / 4, which); },
          OCTAVO_EACH(c) { return values + at + c * kLanes * 4; });
    }
  }
  each<count>(OCTAVO_EACH(r) {
    each<columns * kParts>(OCTAVO_EACH(p) {
      float* to = outputs + r * head_dim + column + p * kRegisterLanes;
      const f32xr kept = load_as<f32xr>(to) * rescale[r], added = sums.template total<r, p>() * factors[r];
      store_bytes(to, kept + added);
    });
  });
}

template <int count>
struct CodeDots::Of {
  static constexpr int kFitting = kSums / count;
  static constexpr int kColumns = kFitting >= 4 ? 4 : kFitting >= 2 ? 2 : 1;
  static constexpr int64_t kMostGroups = 16;

  int32_t* queries;
  int64_t head_dim;
  int32_t starts[count * kMostGroups];
  float query_factors[count];
  alignas(64) f32x16 scaled[count][kTiles];
  alignas(64) int32_t weights[count][kChunk];

  // Rounds the queries of the rows from `first` on to 16 bits of their largest.
  OCTAVO_INLINE void take(const Rows& rows, int64_t first) {
    for (int r = 0; r < count; r++) rows.query(first + r, OCTAVO_EACH(query) { take(query, r); });
  }

  template <typename T>
  OCTAVO_INLINE void take(const T* query, int r) {
    const int64_t groups = code_groups(head_dim);
    const float largest = peak(query, head_dim), inverse = largest < kLeastScale ? 0.0f : kMostQuery / largest;
    query_factors[r] = largest / kMostQuery;
    i32x16 sums{};
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const i32x16 numbers = nearest(load(query + d) * inverse);
      store_words<Kept::kKeys>(queries + r * head_dim + d, numbers);
      sums = sums + numbers;
      if ((d + kLanes) % kCodeGroup && d + kLanes < head_dim) continue;
      starts[r * groups + d / kCodeGroup] = -128 * added(sums);
      sums = i32x16{};
    }
  }

  // A few rows at a time.
  template <int row = 0>
  OCTAVO_INLINE void score(const Tile<int8>* tiles, const Tile<int8>* ahead, float (*scores)[kChunk]) {
    constexpr int some = count - row > kScoreRows ? kScoreRows : count - row;
    const int32_t *numbers = queries + row * head_dim, *begin = starts + row * code_groups(head_dim);
    for (int t = 0; t < kTiles; t++) {
      if (!tiles[t].keys) continue;
      float* to = scores[row] + t * kLanes;
      if constexpr (some <= kTwoTiles) {
        if (t % 2 == 0 && tiles[t + 1].keys) {
          code_scores<some, 2>(numbers, begin, tiles + t, ahead + t, head_dim, query_factors + row, to);
          t++;
          continue;
        }
      }
      code_scores<some, 1>(numbers, begin, tiles + t, ahead + t, head_dim, query_factors + row, to);
    }
    if constexpr (row + some < count) score<row + some>(tiles, ahead, scores);
  }

  // Takes the values' scales into the weights of row r for the tile `t`. One that was never written may be anything.
  OCTAVO_INLINE void weight(const Tile<int8>* tiles, int r, int t, const f32x16& values) {
    const f32x16 zero{};
    scaled[r][t] = tiles[t].values ? select(values != zero, values * load(tiles[t].value_scales), zero) : zero;
  }

  OCTAVO_INLINE void add(const Tile<int8>* tiles, const Tile<int8>* ahead, const int64_t* seen, const float* rescale,
                         float* outputs) {
    const int64_t tokens = seen[count - 1];
    static_assert(count <= kLanes);
    alignas(64) int32_t most[kLanes] = {};
    alignas(64) float factors[kLanes], inverses[kLanes];
    for (int r = 0; r < count; r++) {
      i32x16 sizes{};
      for (int t = 0; t < kTiles; t++) sizes = Larger{}(size_bits(scaled[r][t]), sizes);
      most[r] = largest_size(sizes);
    }
    const f32x16 largest = bits_as<f32x16>(load_as<i32x16>(most)), none{};
    const auto little = largest < broadcast(kLeastScale);
    store(factors, select(little, none, largest / kMostWeight));
    store(inverses, select(little, none, kMostWeight / largest));
    for (int r = 0; r < count; r++)
      for (int t = 0; t < kTiles; t++)
        store_words<Kept::kValues>(weights[r] + t * kLanes, nearest(scaled[r][t] * inverses[r]));
    int64_t column = 0;
    for (; column + kColumns * kLanes <= head_dim; column += kColumns * kLanes)
      add_code_values<count, kColumns>(weights, tiles, ahead, tokens, head_dim, column, rescale, factors, outputs);
    for (; column < head_dim; column += kLanes)
      add_code_values<count, 1>(weights, tiles, ahead, tokens, head_dim, column, rescale, factors, outputs);
  }
};

}  // namespace octavo::OCTAVO_VARIANT
