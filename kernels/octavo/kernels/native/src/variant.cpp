// Compiled once per instruction set, with OCTAVO_VARIANT its name.
#include "variant.h"

#include <time.h>

#include <memory>
#include <vector>

#include "argmax.h"
#include "program.h"
#include "team.h"

namespace octavo::OCTAVO_VARIANT {
namespace {

template <typename Function>
void in_shares(int64_t count, int32_t threads, Function function) {
  on_team(threads, [&](int thread, int team) { function(thread * count / team, (thread + 1) * count / team); });
}

template <typename T>
void pack(const T* weight, T* packed, int64_t outputs, int64_t inputs) {
  constexpr int depth = kDepth<T>;
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < panels; panel++) {
    T* to = packed + panel * inputs * kPanel;
    for (int64_t k = 0; k < inputs; k += depth)
      for (int64_t column = panel * kPanel; column < (panel + 1) * kPanel; column++)
        for (int step = 0; step < depth; step++) *to++ = column < outputs ? weight[column * inputs + k + step] : T{};
  }
}

void pack_weight(const void* weight, void* packed, int64_t outputs, int64_t inputs, int32_t dtype) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    pack((const T*)weight, (T*)packed, outputs, inputs);
  });
}

void linear_call(const Linear& op, const void* x, void* y, int64_t tokens, int32_t dtype, int32_t threads) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    const Pieces pieces = Pieces::of(tokens, (op.outputs + kPanel - 1) / kPanel, op.inputs * sizeof(T));
    std::atomic<int64_t> taken{0};
    on_team(threads, [&](int, int team) {
      const int64_t count = pieces.count(), some = std::max<int64_t>(1, count / (team * 16));
      for (int64_t first; (first = taken.fetch_add(some)) < count;)
        pieces.each(first, std::min(first + some, count), [&](Span rows, int64_t panel, int64_t last) {
          linear<T>(op, x, y, rows, panel, last);
        });
    });
  });
}

void norm_call(const Norm& op, const void* x, void* y, int64_t tokens, int32_t dtype, int32_t threads,
               const Exact& exact) {
  with_type(dtype, [&](auto t) {
    in_shares(tokens, threads, [&](int64_t first, int64_t last) { norms<decltype(t)>(exact, op, x, y, first, last); });
  });
}

void write_call(const void* key, const void* value, int64_t key_stride, int64_t value_stride, const LayerCache& cache,
                const GroupStep& step, int64_t tokens, int64_t kv_heads, int64_t head_dim, int32_t dtype,
                int32_t threads) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    in_shares(tokens, threads, [&](int64_t first, int64_t last) {
      with_cache<T>(cache, [&](auto c) {
        for (int64_t row = first; row < last; row++)
          write_heads<decltype(c)>((const T*)key + row * key_stride, (const T*)value + row * value_stride, cache,
                                   step.slots[row], step.block_size, kv_heads, head_dim);
      });
    });
  });
}

void attend_call(const Attention& op, const void* x, void* y, const GroupStep& step, const LayerCache& cache,
                 int32_t dtype, int32_t threads, const Exact& exact) {
  with_type(dtype, [&](auto t) {
    std::atomic<int64_t> taken{0};
    on_team(threads, [&](int, int) {
      std::vector<float> room(attention_room(op.head_dim));
      for (int64_t unit; (unit = taken.fetch_add(1)) < step.num_units;)
        attention<decltype(t)>(exact, op, x, y, step, cache, step.units[unit], room.data());
    });
  });
}

void argmax_call(const float* logits, int64_t rows, int64_t size, float* values, int64_t* tokens, int32_t threads) {
  in_shares(rows, std::min<int64_t>(threads, rows), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      tokens[row] = argmax(logits + row * size, size);
      values[row] = logits[row * size + tokens[row]];
    }
  });
}

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
}

int64_t largest_head(const Run& run) {
  int64_t largest = 0;
  for (int64_t i = 0; i < run.num_ops; i++)
    if (run.ops[i].kind == kAttention) largest = std::max(largest, run.ops[i].attention.head_dim);
  return largest;
}

// Of the rows that a thread may quantise for itself.
int64_t quantized_room(const Run& run) {
  int64_t inputs = 0;
  for (int64_t i = 0; i < run.num_ops; i++)
    if (run.ops[i].kind == kQuantize) inputs = std::max(inputs, run.ops[i].quantize.size);
  return row_blocks(std::min(run.tokens, kFewRows), inputs);
}

template <typename T>
void run_ops(const Run& run, const Exact& exact) {
  const std::unique_ptr<Progress[]> progress(new Progress[run.num_ops]);
  const int64_t room_size = attention_room(largest_head(run)), quantized_size = quantized_room(run);
  on_team(run.threads, [&](int thread, int threads) {
    std::vector<float> room(room_size);
    const std::unique_ptr<RowBlock[]> quantized(new RowBlock[quantized_size]);
    Worker<T> worker(run, exact, thread, threads, room.data(), quantized.get());
    const bool timing = run.nanoseconds && thread == 0;
    int64_t before = timing ? now() : 0;
    for (int64_t i = 0; i < run.num_ops;) {
      const int64_t done = i;
      i = worker.execute(i, progress[i]);
      if (timing) {
        const int64_t after = now();
        std::fill(run.nanoseconds + done, run.nanoseconds + i, 0);
        run.nanoseconds[done] = after - before;
        before = after;
      }
    }
  });
}

void run_call(const Run& run, const Exact& exact) {
  with_type(run.dtype, [&](auto t) { run_ops<decltype(t)>(run, exact); });
}

}  // namespace

extern const Variant kVariant;
const Variant kVariant = {pack_weight, linear_call, norm_call, write_call, attend_call, argmax_call, run_call};

}  // namespace octavo::OCTAVO_VARIANT
