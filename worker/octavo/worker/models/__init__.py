"""The models: the families that Octavo computes itself, the bridge to transformers, and the choice between them."""
