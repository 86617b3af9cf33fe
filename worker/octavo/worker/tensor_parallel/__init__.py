"""One model spread over several processes: each rank holds a share of the weights and of the keys and values."""
