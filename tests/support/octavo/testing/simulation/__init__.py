"""The whole conversation in one thread of virtual time: the production code of frontends, scheduler and workers, a
network and processes that fail in every way we know, and what must be true all the same. A run is a function of its
seed."""
