// Rows that quantised weights are multiplied by, rounded to 8 bits group by group.
#pragma once

#include <algorithm>

#include "codes.h"
#include "quantized_layout.h"
#include "types.h"

namespace octavo::OCTAVO_VARIANT {

// Small integers of as many lanes as a register has.
template <typename Small>
OCTAVO_INLINE f32xr floats_of(const char* from) {
#if defined(__AVX512F__)
  const __m128i small = _mm_loadu_si128((const __m128i*)from);
  return (f32xr)_mm512_cvtepi32_ps(std::is_signed_v<Small> ? _mm512_cvtepi8_epi32(small) : _mm512_cvtepu8_epi32(small));
#else
  typedef Small Lanes __attribute__((vector_size(kRegisterLanes)));
  return __builtin_convertvector(__builtin_convertvector(load_as<Lanes>(from), i32xr), f32xr);
#endif
}

// The largest of a group without its sign, as bits: sizes have the order of their numbers, infinity and NaN above all.
template <typename T>
OCTAVO_INLINE i32x16 largest_of(const T* group) {
  return Larger{}(size_bits(load(group)), size_bits(load(group + kLanes)));
}

// What `combine` makes of all lanes of each of `count` registers, at most `most`, 4 or 16: a lane each. `of(i)` gives the
// i-th.
template <int most, typename Combine, typename Of>
OCTAVO_INLINE i32x16 combined(int64_t count, Combine combine, Of of) {
  static_assert(most == 4 || most == kLanes);
#if defined(__AVX512F__)
  // Registers are merged by twos until one is left; so lanes come from them in this order.
  constexpr int places[kLanes] = {0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15};
  i32x16 merged[kLanes];
  each<kLanes>(OCTAVO_EACH(i) { merged[places[i]] = i < most && i < count ? of(i) : i32x16{}; });
  const auto neighbours = [&](i32x16& a, const i32x16& b) __attribute__((always_inline)) {
    const __m512i x = (__m512i)a, y = (__m512i)b;
    a = combine((i32x16)_mm512_unpacklo_epi32(x, y), (i32x16)_mm512_unpackhi_epi32(x, y));
  };
  const auto quarters = [&](i32x16& a, const i32x16& b) __attribute__((always_inline)) {
    const __m512i x = (__m512i)a, y = (__m512i)b;
    a = combine((i32x16)_mm512_shuffle_i32x4(x, y, 0x88), (i32x16)_mm512_shuffle_i32x4(x, y, 0xdd));
  };
  constexpr int apart = kLanes / most;
  each<most / 2>(OCTAVO_EACH(i) { neighbours(merged[i * apart], merged[i * apart + 8]); });
  each<most / 4>(OCTAVO_EACH(i) { neighbours(merged[i * apart], merged[i * apart + 4]); });
  if constexpr (most > 4) quarters(merged[1], merged[3]);
  quarters(merged[0], merged[2]);
  quarters(merged[0], merged[1]);
  return merged[0];
#else
  alignas(64) int32_t results[kLanes] = {};
  for (int i = 0; i < count; i++) results[i] = folded(of(i), combine);
  return load_as<i32x16>(results);
#endif
}

// Calls put(i, that of group i) for the first `count`, at most `most`.
template <int most, typename Put>
OCTAVO_INLINE void each_group(int64_t count, const f32x16& scale, const f32x16& scaled_sum, const i32x16& start,
                              const i32x16& first_start, Put put) {
#if defined(__AVX512F__)
  const __m512i a = (__m512i)scale, b = (__m512i)scaled_sum, c = (__m512i)start, d = (__m512i)first_start;
  const __m512i lower = _mm512_unpacklo_epi32(a, b), lower_starts = _mm512_unpacklo_epi32(c, d);
  const __m512i upper = _mm512_unpackhi_epi32(a, b), upper_starts = _mm512_unpackhi_epi32(c, d);
  // In quarter q of the k-th lies group 4 q + k.
  const __m512i groups[] = {
      _mm512_unpacklo_epi64(lower, lower_starts), _mm512_unpackhi_epi64(lower, lower_starts),
      _mm512_unpacklo_epi64(upper, upper_starts), _mm512_unpackhi_epi64(upper, upper_starts)};
  each<most>(OCTAVO_EACH(i) {
    if (i < count) put(i, _mm512_extracti32x4_epi32(groups[i % 4], i / 4));
  });
#else
  alignas(64) float scales[kLanes], scaled_sums[kLanes];
  alignas(64) int32_t starts[kLanes], first_starts[kLanes];
  store(scales, scale), store(scaled_sums, scaled_sum), store_bytes(starts, start), store_bytes(first_starts, first_start);
  for (int64_t i = 0; i < count; i++) put(i, RowGroup{scales[i], scaled_sums[i], starts[i], first_starts[i]});
#endif
}

// Some groups of one row, `count` of at most `most_groups`, to row `place` of the blocks that `to(i)` gives. Scaled, the
// largest of a group is 127; the others are rounded to nearest, ties to even. Where one is infinite or a NaN, the scale is a NaN, and
// so is all that it meets. What is smaller than `kTiny` counts as zero: its scale would overflow. Each step is done for all
// groups before the next: one group's would wait for each other.
template <int most_groups, typename T, typename To>
OCTAVO_INLINE void quantize_groups(const T* x, int64_t count, int64_t place, To to) {
  constexpr float kTiny = 1e-30f;
  alignas(64) float factors[kLanes];
  const i32x16 bits = combined<most_groups>(count, Larger{}, OCTAVO_EACH(i) { return largest_of(x + i * kGroup); });
  const f32x16 most = bits_as<f32x16>(bits), none{};
  const f32x16 finite = select(most < broadcast(kTiny), none, most / 127.0f);
  const f32x16 scale = select(bits < 0x7f800000, finite, broadcast(__builtin_nanf("")));
  store(factors, select(most < broadcast(kTiny), none, 127.0f / most));
  // Rounds half a group, and gives its numbers.
  const auto rounded = [&](auto i, int half) __attribute__((always_inline)) {
    const i32x16 numbers = nearest(load(x + i * kGroup + half * kLanes) * factors[i]);
    store_bytes(to(i)->codes[place] + half * kLanes, converted<u8x16>(numbers));
    return numbers;
  };
  const i32x16 first = combined<most_groups>(count, Added{}, OCTAVO_EACH(i) { return rounded(i, 0); });
  const i32x16 sum = first + combined<most_groups>(count, Added{}, OCTAVO_EACH(i) { return rounded(i, 1); });
  each_group<most_groups>(count, scale, scale * converted<f32x16>(sum), sum * -kByteOffset, first * -kByteOffset,
                          [&](auto i, const auto& group) __attribute__((always_inline)) {
                            static_assert(sizeof(group) == sizeof(RowGroup));
                            std::memcpy(&to(i)->groups[place], &group, sizeof(group));
                          });
}

// What is left of one group of x by what it was rounded to.
template <typename T>
OCTAVO_INLINE void leave_rest(const T* x, const RowBlock& block, int64_t place, float* left) {
  store(left, load(x)), store(left + kLanes, load(x + kLanes));
  for (int at = 0; at < kGroup; at += kRegisterLanes) {
    const f32xr kept = floats_of<int8_t>((const char*)block.codes[place] + at) * block.groups[place].scale;
    store_bytes(left + at, load_as<f32xr>(left + at) - kept);
  }
}

// Asks for a row of x, and for where its groups belong: other threads had both last.
template <typename T>
OCTAVO_INLINE void fetch_row(const T* from, RowBlock* rows, int64_t row, int64_t groups) {
  const RowStripe to = RowStripe::of(rows, row, groups);
  const int64_t place = row % RowBlock::kRows;
  for (int64_t group = 0; group < groups; group++) {
    for (int64_t byte = 0; byte < int64_t(kGroup * sizeof(T)); byte += kLine)
      __builtin_prefetch((const char*)(from + group * kGroup) + byte, 0, 3);
    __builtin_prefetch(to.blocks[group].codes[place], 1, 3);
    __builtin_prefetch(to.blocks[group].groups + place, 1, 3);
  }
}

// Rows `first` to `last` of x to the same rows of `rows`.
template <typename T>
void quantize_rows(const Quantize& op, const void* x, RowBlock* rows, int64_t first, int64_t last) {
  const int64_t groups = op.size / kGroup;
  const auto fetch = [&](int64_t row) __attribute__((always_inline)) {
    if (row < last) fetch_row((const T*)x + row * op.x_stride, rows, row, groups);
  };
  fetch(first);
  for (int64_t row = first; row < last; row++) {
    fetch(row + 1);
    const T* from = (const T*)x + row * op.x_stride;
    const RowStripe to = RowStripe::of(rows, row, groups);
    const int64_t place = row % RowBlock::kRows;
    int64_t done = 0;
    const auto some = [&](auto most, int64_t count) __attribute__((always_inline)) {
      quantize_groups<most>(from + done * kGroup, count, place, OCTAVO_EACH(i) { return to.blocks + done + i; });
      done += count;
    };
    while (groups - done >= kLanes) some(std::integral_constant<int, kLanes>{}, kLanes);
    while (done < groups) some(std::integral_constant<int, 4>{}, std::min<int64_t>(groups - done, 4));
    float scales = 0.0f;
    for (int64_t group = 0; group < groups; group++) scales = scales + to.blocks[group].groups[place].scale;
    // Of a row with a NaN it is one, and no scale is above it.
    const float most = op.twice_above * (scales / float(groups));
    alignas(kLine) float left[kLanes * kGroup];
    RowBlock* rests[kLanes];
    int64_t count = 0;
    for (int64_t group = 0; group < groups; group++) {
      const bool twice = to.blocks[group].groups[place].scale > most;
      to.twice[group][place] = twice;
      if (twice) {
        leave_rest(from + group * kGroup, to.blocks[group], place, left + count * kGroup);
        rests[count++] = to.rests + group;
      }
      if (count == kLanes || (count && group + 1 == groups)) {
        quantize_groups<kLanes>(left, count, place, OCTAVO_EACH(i) { return rests[i]; });
        count = 0;
      }
    }
  }
}

}  // namespace octavo::OCTAVO_VARIANT
