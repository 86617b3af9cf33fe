"""The bridge to transformers: any of its decoder-only architectures, with paged attention, its layers shared among
ranks."""
