"""Who owns which KV block: reference counts, the prefix cache and its eviction order.

A block holds ``block_size`` token positions of every layer. Full blocks of verified tokens are published under a
cryptographic hash of everything that led to them, so a later request with the same beginning and the same salt reuses
them. Blocks nobody references stay published until they are needed for something else, least recently used first.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class OutOfBlocksError(Exception):
    """The pool cannot give as many blocks as were asked for; nothing was taken."""


def chain_root(salt: str) -> bytes:
    """The parent digest of a sequence's first block; sequences with different salts share nothing."""
    return hashlib.sha256(b"headlong-prefix\0" + salt.encode()).digest()


def chain_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of a block that continues ``parent`` with ``token_ids``."""
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()


@dataclass(slots=True)
class Block:
    """ref_count: requests that use the block. digest: its name in the prefix cache, None while unpublished."""

    ref_count: int = 0
    digest: bytes | None = None


class BlockPool:
    """Hands out blocks by index; every block is either referenced or in the free queue, never both."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._blocks = [Block() for _ in range(num_blocks)]
        # Oldest first; a dict because a prefix hit takes a block out of the middle.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._published: dict[bytes, int] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, published but unreferenced ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that live requests reference."""
        return 1.0 - len(self._free) / max(1, len(self._blocks))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` blocks, evicting the least recently used published ones if need be.

        Raises OutOfBlocksError and takes nothing if there are too few.
        """
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks wanted, {len(self._free)} free")
        return [self._take_oldest() for _ in range(count)]

    def _take_oldest(self) -> int:
        index, _ = self._free.popitem(last=False)
        block = self._blocks[index]
        if block.digest is not None:
            del self._published[block.digest]
            block.digest = None
        block.ref_count = 1
        return index

    def acquire_prefix(self, digests: Iterable[bytes]) -> list[int]:
        """References the longest run of published blocks for ``digests``, a chain from the first block on."""
        found: list[int] = []
        if not self.prefix_caching:
            return found
        for digest in digests:
            index = self._published.get(digest)
            if index is None:
                break
            block = self._blocks[index]
            if block.ref_count == 0:
                del self._free[index]
            block.ref_count += 1
            found.append(index)
        return found

    def publish(self, index: int, digest: bytes) -> None:
        """Names a full block of verified tokens. A digest that is already published keeps its first block."""
        if not self.prefix_caching or digest in self._published:
            return
        block = self._blocks[index]
        assert block.ref_count > 0
        assert block.digest is None
        block.digest = digest
        self._published[digest] = index

    def release(self, indices: Sequence[int]) -> None:
        """Drops one reference from each block.

        The last block of a sequence is freed first, so that a prefix outlives its tail.
        """
        for index in reversed(indices):
            block = self._blocks[index]
            assert block.ref_count > 0
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[index] = None
                # An unpublished block holds nothing worth keeping: reuse it before any cached one.
                if block.digest is None:
                    self._free.move_to_end(index, last=False)

    def check_invariants(self) -> None:
        """Raises AssertionError unless references, the free queue and the published names agree."""
        free = {index for index, block in enumerate(self._blocks) if block.ref_count == 0}
        assert free == set(self._free), "free queue and reference counts disagree"
        named = {block.digest: index for index, block in enumerate(self._blocks) if block.digest is not None}
        assert named == self._published, "published names and blocks disagree"
