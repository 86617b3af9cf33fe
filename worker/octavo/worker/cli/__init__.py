"""The commands `octavo worker`, `calibrate`, `prepare-model` and `convert-weights`."""
