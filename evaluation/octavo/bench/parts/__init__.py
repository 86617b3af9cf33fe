"""Measures one part of Octavo at a time: a step of the scheduler or the sampler, a block, an encryption."""
