"""The commands `octavo worker`, `calibrate`, `prepare-model`, `convert-weights` and `quantize`."""
