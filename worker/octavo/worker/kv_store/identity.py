"""Blocks are of use to each other where their identities are equal, and are found by their names.

A block's bytes mean something only to a worker that computes the same model, lays blocks out in the same way and
reckons in the same way. All of that is a `StoreIdentity`; blocks of different identities lie in different directories.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Final

NAME_BYTES: Final = 32
# A segment's header has room for it.
_LONGEST: Final = 3072


@dataclass(frozen=True)
class StoreIdentity:
    """Says whose blocks may stand for each other. `model` is the fingerprint of weights and configuration, `dtype` the
    KV cache's, `layout` names the order of a block's bytes, `numerics` what decides the last bit of a result (the mode,
    the kernels' instruction set), `shard` a rank's share, as "0/2". `block_size` counts tokens.

    Adapter, salt and pinned prefix are in the names: they are in the chain of hashes.
    """

    model: str
    dtype: str
    layout: str
    numerics: str
    block_size: int
    block_bytes: int
    shard: str = "0/1"

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_bytes < 1:
            raise ValueError(f"a block has tokens and bytes: got {self.block_size} and {self.block_bytes}")
        if len(self.encoded) > _LONGEST:
            raise ValueError(
                f"an identity takes {_LONGEST} bytes of JSON at most, got {len(self.encoded)}: {self.encoded}"
            )

    @property
    def encoded(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def directory_name(self) -> str:
        """Returns the name of the directory of its blocks. Whether they are its blocks each segment says in full."""
        return hashlib.sha256(self.encoded.encode()).hexdigest()[:32]


def block_name(value: bytes, kv_group: int) -> bytes:
    """Returns the name of a block in one KV group. `value` is the chained hash of its tokens, salt and adapter, which
    the blocks of all groups over these tokens share."""
    return hashlib.blake2b(value, digest_size=NAME_BYTES, key=kv_group.to_bytes(4, "little")).digest()
