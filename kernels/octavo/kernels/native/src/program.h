// A model's layers as a list of operations over shared buffers, run by one team of threads from end to end. A thread goes
// on to the next operation when all pieces of the last are done, whoever did them: one that has lost its core holds up the
// others by the piece in its hands, not by every operation.
#pragma once

#include <sched.h>

#include <atomic>

#include "attention.h"
#include "linear.h"
#include "small_ops.h"

namespace octavo::OCTAVO_VARIANT {

// Of the pieces of one operation, how many were taken and how many are done.
struct alignas(64) Progress {
  std::atomic<int64_t> taken{0}, done{0};

  // Until all are done. Spins first: the others are rarely far behind.
  void wait(int64_t pieces) const {
    constexpr int kSpins = 5000;
    for (int spins = 0; done.load(std::memory_order_acquire) < pieces; spins++) {
      if (spins >= kSpins) {
        sched_yield();
        continue;
      }
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
  // `room`: fp32, kAttentionRows x the largest head.
  Worker(const Run& run, int threads, float* room) : run_(run), threads_(threads), room_(room) {}

  void execute(const Op& op, Progress& progress) const {
    const int64_t pieces = count(op), some = std::max<int64_t>(1, op.kind == kAttention ? 1 : pieces / (threads_ * 8));
    for (int64_t first; (first = progress.taken.fetch_add(some, std::memory_order_relaxed)) < pieces;) {
      const int64_t last = std::min(first + some, pieces);
      perform(op, first, last);
      progress.done.fetch_add(last - first, std::memory_order_acq_rel);
    }
    progress.wait(pieces);
  }

 private:
  T* buffer(const BufferAt& at) const { return (T*)run_.buffers[at.buffer] + at.offset; }

  const GroupStep& group(const Op& op) const { return run_.groups[run_.layers[op.layer].group]; }

  int64_t count(const Op& op) const {
    switch (op.kind) {
      case kLinear: return (op.linear.outputs + kPanel - 1) / kPanel;
      case kAttention: return group(op).num_units;
      default: return run_.tokens;
    }
  }

  void perform(const Op& op, int64_t first, int64_t last) const {
    const T* in = buffer(op.in);
    T* out = buffer(op.out);
    switch (op.kind) {
      case kLinear: return linear<T>(op.linear, in, out, run_.tokens, first, last);
      case kNorm: return norm_rows<T>(op.norm, in, out, first, last);
      case kRopeWrite:
        return rope_write_rows<T>(op.rope_write, out, run_.positions, group(op), run_.layers[op.layer].cache, first,
                                  last);
      case kAttention:
        for (int64_t unit = first; unit < last; unit++)
          attend_unit<T>(op.attention, in, out, group(op), run_.layers[op.layer].cache, group(op).units[unit], room_);
    }
  }

  const Run& run_;
  const int threads_;
  float* const room_;
};

}  // namespace octavo::OCTAVO_VARIANT
