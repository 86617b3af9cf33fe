"""Real processes for benchmarks, campaigns and tests: started, cut off, watched and judged."""
