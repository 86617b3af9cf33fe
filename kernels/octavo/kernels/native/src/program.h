// A model's layers as a list of operations over shared buffers, run by one team of threads from end to end. A thread goes
// on to the next operation when all pieces of the last are done, whoever did them: one that has lost its core holds up the
// others by the piece in its hands, not by every operation.
#pragma once

#include <sched.h>

#include <atomic>

#include "attention.h"
#include "linear.h"
#include "pieces.h"
#include "quantized_layout.h"
#include "small_ops.h"
#include "variant.h"

namespace octavo::OCTAVO_VARIANT {

template <typename T>
void norms(const Exact& exact, const Norm& op, const void* x, void* y, int64_t first, int64_t last) {
  if (std::is_same_v<T, float> && op.exact) return exact.floats->norm_rows(op, x, y, first, last);
  norm_rows<T>(op, x, y, first, last);
}

template <typename T>
void rope_writes(const Exact& exact, const RopeWrite& op, void* x, const int64_t* positions, const GroupStep& step,
                 const LayerCache& cache, int64_t first, int64_t last) {
  if (std::is_same_v<T, float> && op.exact)
    return exact.floats->rope_write_rows(op, x, positions, step, cache, first, last);
  rope_write_rows<T>(op, x, positions, step, cache, first, last);
}

template <typename T>
void attention(const Exact& exact, const Attention& op, const void* x, void* y, const GroupStep& step,
               const LayerCache& cache, const Unit& unit, float* room) {
  if (cache.dtype == kInt8) return exact.attend_codes(op, x, y, step, cache, unit, room, kTypeOf<T>);
  if (op.exact) return exact.floats->attend_unit(op, x, y, step, cache, unit, room);
  with_type(cache.dtype, OCTAVO_EACH(c) {
    using C = decltype(c);
    attend_unit<Floats<C, Left<C>>>(op, x, y, step, cache, unit, room, kTypeOf<T>);
  });
}

// Of so few rows a product waits for its weights, more or less of the time.
constexpr int64_t kFewTokens = 32;

// Weights that will be read soon. A few rows take as long as reading the weights does, and each operation would begin
// with a wait for the first of its own.
struct Ahead {
  const char* at = nullptr;
  const char* end = nullptr;

  // Asks for the next few lines.
  OCTAVO_INLINE void step() {
    for (int line = 0; line < 4 && at < end; line++, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// Of the pieces of one operation, how many were taken and how many are done.
struct alignas(64) Progress {
  std::atomic<int64_t> taken{0}, done{0};

  // Until all are done. Spins first: the others are rarely far behind.
  void wait(int64_t pieces, Ahead& ahead) const {
    constexpr int kSpins = 5000;
    for (int spins = 0; done.load(std::memory_order_acquire) < pieces; spins++) {
      if (spins >= kSpins) {
        sched_yield();
        continue;
      }
      ahead.step();
#if defined(__x86_64__)
      _mm_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
  }
};

template <typename T>
class Worker {
 public:
  // `room`: `attention_room` of the largest head. `quantized`: room for `kFewRows` of the longest quantised rows.
  Worker(const Run& run, const Exact& exact, int thread, int threads, float* room, RowBlock* quantized)
      : run_(run), exact_(exact), thread_(thread), threads_(threads), room_(room), quantized_(quantized) {}

  // Does the operation `index`, and with it those after it that go on with the same rows; gives the next to be done.
  int64_t execute(int64_t index, Progress& progress) {
    const Op& op = run_.ops[index];
    if (op.kind == kQuantize && few()) {
      exact_.quantize(op.quantize, buffer(op.in), quantized_, 0, run_.tokens, run_.dtype);
      return index + 1;
    }
    int64_t end = index + 1;
    while (end < run_.num_ops && goes_on(run_.ops[end - 1], run_.ops[end])) end++;
    const int64_t pieces = count(op);
    int64_t first = progress.taken.load(std::memory_order_relaxed);
    while (first < pieces) {
      const int64_t last = first + at_a_time(op, pieces, pieces - first);
      if (!progress.taken.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
      for (int64_t i = index; i < end; i++) perform(run_.ops[i], first, last);
      progress.done.fetch_add(last - first, std::memory_order_acq_rel);
      first = progress.taken.load(std::memory_order_relaxed);
    }
    look_ahead(end);
    progress.wait(pieces, ahead_);
    return end;
  }

 private:
  T* buffer(const BufferAt& at) const { return (T*)run_.buffers[at.buffer] + at.offset; }

  // Whether each thread quantises all rows for itself.
  bool few() const { return run_.tokens <= kFewRows; }

  // Whether of each row `next` reads only what this thread has just made of it: then nobody need wait in between.
  bool goes_on(const Op& op, const Op& next) const {
    return op.kind == kNorm && (next.kind == kNorm || (next.kind == kQuantize && !few()));
  }

  const GroupStep& group(const Op& op) const { return run_.groups[run_.layers[op.layer].group]; }

  int64_t count(const Op& op) const {
    switch (op.kind) {
      case kLinear:
      case kQuantizedLinear: return pieces_of(op).count();
      case kAttention: return group(op).num_units;
      default: return run_.tokens;
    }
  }

  // How many of `left` pieces, of `pieces`, a thread takes.
  int64_t at_a_time(const Op& op, int64_t pieces, int64_t left) const {
    if (op.kind == kAttention) return 1;
    // What few rows take is reading weights: the first to come reads its whole share in one stretch, and those after it
    // theirs of what is left, piece behind piece.
    if (multiplies(op) && run_.tokens <= kFewTokens) return std::max<int64_t>(1, left / threads_);
    const int64_t some = std::max<int64_t>(1, pieces / (threads_ * 8));
    // Texts begin with a sixteen of slots.
    return std::min(left, op.kind == kRopeWrite && some > kLanes ? some / kLanes * kLanes : some);
  }

  // While this thread waits, it fetches what it will probably read first of the next product from `index` on.
  void look_ahead(int64_t index) {
    constexpr int64_t kBytes = 128 << 10;
    if (run_.tokens > kFewTokens) return;
    while (index < run_.num_ops && !multiplies(run_.ops[index])) index++;
    if (index >= run_.num_ops || index == looked_ahead_) return;
    looked_ahead_ = index;
    const Op& next = run_.ops[index];
    const int64_t panel = panel_bytes(next), pieces = count(next), some = at_a_time(next, pieces, pieces);
    ahead_.at = (const char*)linear_of(next).weight + thread_ * some * panel;
    ahead_.end = ahead_.at + std::min(some * panel, kBytes);
  }

  static bool multiplies(const Op& op) { return op.kind == kLinear || op.kind == kQuantizedLinear; }

  static const Linear& linear_of(const Op& op) { return op.kind == kLinear ? op.linear : op.quantized_linear.linear; }

  Pieces pieces_of(const Op& op) const {
    const Linear& linear = linear_of(op);
    const int64_t bytes = op.kind == kLinear ? linear.inputs * int64_t(sizeof(T)) : quantized_row_bytes(linear.inputs);
    return Pieces::of(run_.tokens, (linear.outputs + kPanel - 1) / kPanel, bytes);
  }

  static int64_t panel_bytes(const Op& op) {
    if (op.kind == kLinear) return op.linear.inputs * kPanel * int64_t(sizeof(T));
    return kFormats[op.quantized_linear.format].panel_bytes(op.quantized_linear.linear.inputs, op.quantized_linear.group);
  }

  void perform(const Op& op, int64_t first, int64_t last) const {
    const T* in = buffer(op.in);
    T* out = buffer(op.out);
    switch (op.kind) {
      case kLinear:
        return pieces_of(op).each(first, last, [&](Span rows, int64_t panel, int64_t end) {
          linear<T>(op.linear, in, out, rows, panel, end);
        });
      case kQuantizedLinear: {
        const RowBlock* rows = few() ? quantized_ : (const RowBlock*)run_.buffers[op.in.buffer];
        return pieces_of(op).each(first, last, [&](Span span, int64_t panel, int64_t end) {
          exact_.quantized_linear(op.quantized_linear, rows, out, span, panel, end, run_.dtype);
        });
      }
      case kQuantize: return exact_.quantize(op.quantize, in, (RowBlock*)run_.buffers[op.out.buffer], first, last, run_.dtype);
      case kNorm: return norms<T>(exact_, op.norm, in, out, first, last);
      case kRopeWrite:
        return rope_writes<T>(exact_, op.rope_write, out, run_.positions, group(op), run_.layers[op.layer].cache, first,
                              last);
      case kAttention:
        for (int64_t unit = first; unit < last; unit++)
          attention<T>(exact_, op.attention, in, out, group(op), run_.layers[op.layer].cache, group(op).units[unit], room_);
    }
  }

  const Run& run_;
  const Exact& exact_;
  const int thread_, threads_;
  float* const room_;
  RowBlock* const quantized_;
  Ahead ahead_;
  int64_t looked_ahead_ = -1;
};

}  // namespace octavo::OCTAVO_VARIANT
