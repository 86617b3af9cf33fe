// Teams of threads.
#pragma once

#include <omp.h>

#include <cstdint>

namespace octavo {

// Calls function(thread, threads) on a team.
template <typename Function>
void on_team(int32_t threads, Function function) {
  if (threads == 1) return function(0, 1);
#pragma omp parallel num_threads(threads)
  function(omp_get_thread_num(), omp_get_num_threads());
}

}  // namespace octavo
