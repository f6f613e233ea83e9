"""Block accounting and the prefix cache."""

from __future__ import annotations

import random

import pytest

from engine.kv_cache import BlockPool, OutOfBlocksError, chain_digest, chain_root


def digests(tokens: list[int], salt: str = "", size: int = 2) -> list[bytes]:
    chain = [chain_root(salt)]
    for start in range(0, len(tokens) - size + 1, size):
        chain.append(chain_digest(chain[-1], tokens[start : start + size]))
    return chain[1:]


def test_running_out_takes_nothing() -> None:
    pool = BlockPool(3, 2)
    pool.allocate(2)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_published_prefix_is_shared_and_outlives_its_request() -> None:
    pool = BlockPool(4, 2)
    blocks, names = pool.allocate(2), digests([1, 2, 3, 4])
    for block, name in zip(blocks, names, strict=True):
        pool.publish(block, name)
    assert pool.acquire_prefix(names) == blocks
    pool.release(blocks)
    pool.release(blocks)
    assert pool.num_free == 4
    assert pool.acquire_prefix(names) == blocks
    pool.check_invariants()


def test_the_chain_depends_on_everything_before_and_on_the_salt() -> None:
    assert digests([1, 2, 3, 4])[1] != digests([9, 2, 3, 4])[1]
    assert digests([1, 2], "tenant a") != digests([1, 2], "tenant b")
    assert digests([1, 23]) != digests([12, 3])


def test_the_tail_is_evicted_before_the_beginning_and_unpublished_before_both() -> None:
    pool = BlockPool(4, 2)
    blocks, names = pool.allocate(3), digests([1, 2, 3, 4, 5, 6])
    for block, name in zip(blocks[:2], names, strict=False):
        pool.publish(block, name)
    pool.release(blocks)
    pool.allocate(2)  # the never used and the unpublished block
    assert len(pool.acquire_prefix(names)) == 2
    pool.release(blocks[:2])
    pool.allocate(1)
    assert pool.acquire_prefix(names) == blocks[:1]
    pool.check_invariants()


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, 2, prefix_caching=False)
    pool.publish(pool.allocate(1)[0], digests([1, 2])[0])
    assert pool.acquire_prefix(digests([1, 2])) == []


def test_random_use_keeps_the_invariants() -> None:
    draw, pool = random.Random(0), BlockPool(12, 2)
    held: list[list[int]] = []
    for _ in range(2000):
        if held and draw.random() < 0.5:
            pool.release(held.pop(draw.randrange(len(held))))
        else:
            tokens = [draw.randrange(2) for _ in range(draw.choice([2, 4, 6]))]
            names = digests(tokens)
            found = pool.acquire_prefix(names)
            missing = len(names) - len(found)
            if missing > pool.num_free:
                pool.release(found)
                continue
            blocks = found + pool.allocate(missing)
            for block, name in zip(blocks[len(found) :], names[len(found) :], strict=True):
                pool.publish(block, name)
            held.append(blocks)
        pool.check_invariants()
    for blocks in held:
        pool.release(blocks)
    assert pool.num_free == 12
