// Calls the kernels' C interface and compares with plain loops, for machines that the tests' Python does not run on.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "quantized_layout.h"
#include "types.h"

using namespace octavo;

extern "C" {
const char* octavo_choose(const char* name);
void octavo_pack_weight(const void* weight, void* packed, int64_t outputs, int64_t inputs, int32_t dtype);
void octavo_linear(const Linear* op, const void* x, void* y, int64_t tokens, int32_t dtype, int32_t threads);
void octavo_norm(const Norm* op, const void* x, void* y, int64_t tokens, int32_t dtype, int32_t threads);
void octavo_plan(const GroupStep* step, int64_t sequences, int64_t kv_heads, int64_t unit_tokens, Unit* units, int64_t* blocks);
void octavo_write(const void* key, const void* value, int64_t key_stride, int64_t value_stride, const LayerCache* cache,
                  const GroupStep* step, int64_t tokens, int64_t kv_heads, int64_t head_dim, int32_t dtype, int32_t threads);
void octavo_attend(const Attention* op, const void* x, void* y, const GroupStep* step, const LayerCache* cache, int32_t dtype,
                   int32_t threads);
int32_t octavo_quantized_format(const WeightFormat* format);
void octavo_pack_quantized(int32_t format, const QuantizedTensors* tensors, const int64_t* order, char* packed, int64_t panels);
void octavo_quantized_linear(const QuantizedLinear* op, const Quantize* quantize, const void* x, void* y, int64_t tokens,
                             int32_t dtype, int32_t threads);
void octavo_argmax(const float* logits, int64_t rows, int64_t size, float* values, int64_t* tokens, int32_t threads);
}

namespace {

int failures = 0, checks = 0;

void check(bool holds, const char* what, long a, long b) {
  checks++;
  if (!holds && failures++ < 20) std::printf("wrong: %s %ld %ld\n", what, a, b);
}

float next_random() {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return float(int32_t(state >> 32)) / 2147483648.0f;
}

// Numbers of a type, rounded to it by cutting off, and the same as floats.
struct Numbers {
  int32_t dtype;
  std::vector<float> floats;
  std::vector<uint16_t> halves;

  Numbers(int32_t type, size_t count, bool random = true) : dtype(type), floats(count), halves(count) {
    for (size_t i = 0; i < count; i++) set(i, random ? next_random() : 0.0f);
  }
  void set(size_t i, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (dtype == kBFloat16) bits &= 0xffff0000u;
    halves[i] = uint16_t(bits >> 16);
    std::memcpy(&floats[i], &bits, 4);
  }
  size_t size() const { return dtype == kBFloat16 ? 2 : 4; }
  char* at(size_t i) { return dtype == kBFloat16 ? (char*)&halves[i] : (char*)&floats[i]; }
  float get(size_t i) const {
    if (dtype == kFloat32) return floats[i];
    const uint32_t bits = uint32_t(halves[i]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
};

bool near(float actual, double expected, int32_t dtype, double scale = 1) {
  return std::fabs(actual - expected) <= (dtype == kBFloat16 ? 1e-2 : 2e-5) * (scale + std::fabs(expected));
}

void products(int32_t dtype, int64_t outputs, int64_t inputs, int64_t rows, bool gate) {
  const int64_t columns = (outputs + 31) / 32 * 32, shown = gate ? outputs / 2 : outputs;
  Numbers weight(dtype, outputs * inputs), packed(dtype, columns * inputs, false), x(dtype, rows * inputs);
  Numbers y(dtype, rows * shown, false), one(dtype, shown, false);
  octavo_pack_weight(weight.at(0), packed.at(0), outputs, inputs, dtype);
  const Linear op{packed.at(0), nullptr, inputs, outputs, inputs, shown, gate ? kGate : kStore, kSilu, 1.0f};
  octavo_linear(&op, x.at(0), y.at(0), rows, dtype, 2);
  for (int64_t r = 0; r < rows; r++) {
    octavo_linear(&op, x.at(r * inputs), one.at(0), 1, dtype, 1);
    check(!std::memcmp(one.at(0), y.at(r * shown), shown * y.size()), "a row alone", rows, r);
    std::vector<double> sums(outputs);
    for (int64_t c = 0; c < outputs; c++)
      for (int64_t k = 0; k < inputs; k++) sums[c] += double(x.get(r * inputs + k)) * weight.get(c * inputs + k);
    for (int64_t c = 0; c < shown; c++) {
      // Of 32 columns 16 are gates.
      const double g = sums[gate ? c / 16 * 32 + c % 16 : c], up = gate ? sums[c / 16 * 32 + 16 + c % 16] : 0;
      check(near(y.get(r * shown + c), gate ? g / (1 + std::exp(-g)) * up : g, dtype, std::sqrt(double(inputs))), "product", r, c);
    }
  }
}

// A half of these bits.
float half_as_float(uint16_t bits) {
  return std::ldexp(float((bits & 1023) | 1024), (bits >> 10 & 31) - 25) * (bits >> 15 ? -1.0f : 1.0f);
}

// Each product and each sum rounded by itself, to the bit.
void quantized_products(const WeightFormat& format, int64_t rows) {
  const int64_t outputs = 40, inputs = 512, group = 128, groups = inputs / kGroup, panels = 2;
  const bool small = format.small_bytes() != 0, sixteens = format.scales == kSixteenScales;
  const int64_t each = format.scales == kFloatScales ? group : sixteens ? 16 : kGroup, wide = small ? 256 : each;
  std::vector<char> codes(outputs * inputs), scales(outputs * inputs), mins(scales), wides(scales), wide_mins(scales);
  std::vector<float> x(rows * inputs), y(rows * outputs), scale(outputs * inputs), min(outputs * inputs);
  for (auto& code : codes) code = char(int(next_random() * 32768) & ((1 << format.bits) - 1));
  for (auto& value : x) value = next_random();
  for (int64_t i = 0; i < outputs * inputs; i++) scales[i] = char(int(next_random() * 127)), mins[i] = char(int(next_random() * 127));
  std::vector<uint16_t> halves(outputs * inputs);
  std::vector<float> floats(outputs * inputs);
  for (int64_t i = 0; i < outputs * inputs; i++) halves[i] = uint16_t(0x2000 + (int(next_random() * 32767) & 0x8bff)), floats[i] = next_random();
  char* large = format.scales == kFloatScales ? (char*)floats.data() : (char*)halves.data();
  const auto large_at = [&](int64_t i) { return format.scales == kFloatScales ? floats[i] : half_as_float(halves[i]); };
  for (int64_t o = 0; o < outputs; o++)
    for (int64_t k = 0; k < inputs; k++) {
      const float factor = large_at((o * inputs + k) / wide);
      const char number = scales[(o * inputs + k) / each], less = mins[(o * inputs + k) / each];
      scale[o * inputs + k] = small ? factor * (sixteens ? float(int8_t(number)) : float(uint8_t(number))) : factor;
      min[o * inputs + k] = !format.mins ? 0 : small ? -factor * float(uint8_t(less)) : factor;
    }
  int8_t values[16];
  for (int i = 0; i < 16; i++) values[i] = int8_t(i * i - 100);
  const QuantizedTensors tensors{codes.data(), small ? scales.data() : large, small ? mins.data() : large, large, large, inputs, group};
  std::vector<int64_t> order(panels * 32, -1);
  for (int64_t o = 0; o < outputs; o++) order[o] = o;
  std::vector<char> packed(panels * format.panel_bytes(inputs, group));
  const int32_t index = octavo_quantized_format(&format);
  octavo_pack_quantized(index, &tensors, order.data(), packed.data(), panels);
  QuantizedLinear op{{packed.data(), nullptr, inputs, outputs, inputs, outputs, kStore, kSilu, 1.0f}, group, index, {}};
  std::memcpy(op.values, values, 16);
  // Groups whose scale is above the mean of their row's are rounded twice: about half of them.
  const Quantize quantize{inputs, inputs, 1.0f};
  octavo_quantized_linear(&op, &quantize, x.data(), y.data(), rows, kFloat32, 2);
  for (int64_t r = 0; r < rows; r++) {
    std::vector<float> left(x.begin() + r * inputs, x.begin() + (r + 1) * inputs);
    const auto most_of = [&](int64_t g) {
      float most = 0;
      for (int64_t k = g * kGroup; k < (g + 1) * kGroup; k++) most = std::fmax(most, std::fabs(left[k]));
      return most;
    };
    std::vector<bool> twice(groups);
    volatile float total = 0;
    for (int64_t g = 0; g < groups; g++) total = total + most_of(g) / 127.0f;
    const float mean = total / float(groups);
    for (int64_t g = 0; g < groups; g++) twice[g] = most_of(g) / 127.0f > mean;
    std::vector<float> expected(outputs);
    // Once for all groups, then once more for what that leaves of some.
    for (int again = 0; again < 2; again++)
      for (int64_t g = 0; g < groups; g++) {
        if (again && !twice[g]) continue;
        const float most = most_of(g), row_scale = most / 127.0f;
        int32_t q[kGroup], row_sum = 0;
        for (int i = 0; i < kGroup; i++) {
          volatile float scaled = left[g * kGroup + i] * (127.0f / most);
          q[i] = int32_t(std::nearbyint(scaled)), row_sum += q[i];
        }
        for (int64_t o = 0; o < outputs; o++) {
          volatile float sum = expected[o];
          const int64_t step = sixteens ? 16 : kGroup, at = o * inputs + g * kGroup;
          for (int64_t first = 0; first < kGroup; first += step) {
            int32_t dot = 0;
            for (int64_t i = first; i < first + step; i++) {
              const int32_t code = uint8_t(codes[at + i]);
              dot += q[i] * (format.table ? values[code] : code - format.offset);
            }
            volatile float product = scale[at + first] * row_scale;
            product = product * float(dot);
            sum = sum + product;
          }
          volatile float scaled_sum = row_scale * float(row_sum);
          scaled_sum = min[at] * scaled_sum;
          if (format.mins) sum = sum + scaled_sum;
          expected[o] = sum;
        }
        for (int i = 0; i < kGroup; i++) {
          volatile float kept = float(q[i]) * row_scale;
          left[g * kGroup + i] = left[g * kGroup + i] - kept;
        }
      }
    for (int64_t o = 0; o < outputs; o++) check(y[r * outputs + o] == expected[o], "quantised product", index, o);
  }
}

void attention(int32_t dtype, int64_t history, int64_t tokens, int64_t d, int64_t group, int64_t window) {
  const int64_t kv_heads = 2, heads = kv_heads * group, block_size = 16, context = history + tokens;
  const int64_t blocks = (context + block_size - 1) / block_size, block = kv_heads * block_size * d;
  Numbers keys(dtype, context * kv_heads * d), values(dtype, context * kv_heads * d), q(dtype, tokens * heads * d);
  Numbers key_cache(dtype, blocks * block, false), value_cache(dtype, blocks * block, false);
  // What was never written may hold anything.
  std::memset(value_cache.at(0), 0xff, blocks * block * value_cache.size());
  std::memset(key_cache.at(0), 0xff, blocks * block * key_cache.size());
  std::vector<int64_t> slots(context), table(blocks), firsts{0, tokens}, contexts{context};
  for (int64_t i = 0; i < blocks; i++) table[i] = blocks - 1 - i;
  for (int64_t i = 0; i < context; i++) slots[i] = table[i / block_size] * block_size + i % block_size;
  std::vector<Unit> units(kv_heads * (tokens + 15) / 16 + kv_heads);
  const LayerCache cache{key_cache.at(0), value_cache.at(0), block, dtype};
  GroupStep step{slots.data(),   table.data(), contexts.data(), firsts.data(), units.data(), kv_heads * ((tokens + 15) / 16),
                 blocks, block_size,   window};
  octavo_write(keys.at(0), values.at(0), kv_heads * d, kv_heads * d, &cache, &step, context, kv_heads, d, dtype, 2);
  step.slots = slots.data() + history;
  int64_t touched[2];
  octavo_plan(&step, 1, kv_heads, 16, units.data(), touched);
  Numbers y(dtype, tokens * heads * d, false);
  const Attention op{nullptr, heads, kv_heads, d, heads * d, heads * d, 1 / std::sqrt(float(d)), 0};
  octavo_attend(&op, q.at(0), y.at(0), &step, &cache, dtype, 2);
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < heads; h++) {
      const int64_t last = history + t, begin = window && last + 1 > window ? last + 1 - window : 0;
      std::vector<double> weights(last + 1), sums(d);
      double total = 0;
      for (int64_t p = begin; p <= last; p++) {
        double score = 0;
        for (int64_t i = 0; i < d; i++) score += double(q.get((t * heads + h) * d + i)) * keys.get((p * kv_heads + h / group) * d + i);
        total += weights[p] = std::exp(score / std::sqrt(double(d)));
      }
      for (int64_t p = begin; p <= last; p++)
        for (int64_t i = 0; i < d; i++) sums[i] += weights[p] / total * values.get((p * kv_heads + h / group) * d + i);
      for (int64_t i = 0; i < d; i++) check(near(y.get((t * heads + h) * d + i), sums[i], dtype), "attended", t, h);
    }
}

void norm(int32_t dtype, int64_t size) {
  Numbers x(dtype, size), y(dtype, size, false), weight(kFloat32, size);
  const Norm op{weight.floats.data(), size, size, size, 1e-5f, 1, kStore};
  octavo_norm(&op, x.at(0), y.at(0), 1, dtype, 1);
  double squares = 0;
  for (int64_t i = 0; i < size; i++) squares += double(x.get(i)) * x.get(i);
  for (int64_t i = 0; i < size; i++)
    check(near(y.get(i), x.get(i) / std::sqrt(squares / size + 1e-5) * weight.get(i), dtype), "norm", size, i);
}

void largest(int64_t size) {
  Numbers logits(kFloat32, size);
  logits.floats[size / 3] = logits.floats[size / 2] = 2;
  float value;
  int64_t place;
  octavo_argmax(logits.floats.data(), 1, size, &value, &place, 1);
  check(place == size / 3 && value == 2, "the first of the largest", size, place);
  logits.floats[size - 1] = NAN;
  octavo_argmax(logits.floats.data(), 1, size, &value, &place, 1);
  check(place == size - 1 && std::isnan(value), "a NaN", size, place);
}

}  // namespace

int main() {
  // The instruction sets that this machine has: all that there are for it, if it is an emulator.
  for (const char* name : {"dotprod", "portable"}) {
    const bool runs = octavo_choose(name) != nullptr;
    check(runs, name, 0, 0);
    for (const WeightFormat& format : kFormats)
      for (int64_t rows : {1, 7, 30}) quantized_products(format, rows);
  }
  for (int32_t dtype : {kFloat32, kBFloat16}) {
    for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 13, 40, 100}) products(dtype, 70, 50, rows, false);
    for (int64_t rows : {1, 3, 6, 31}) products(dtype, 64, 600, rows, true);
    for (int64_t d : {16, 64, 80}) attention(dtype, 40, 1, d, 3, 0), attention(dtype, 0, 33, d, 1, 0);
    attention(dtype, 100, 20, 64, 7, 0), attention(dtype, 70, 9, 64, 3, 17);
    norm(dtype, 50), norm(dtype, 64);
  }
  largest(50), largest(3000);
  std::printf("%d of %d checks failed\n", failures, checks);
  return failures != 0;
}
