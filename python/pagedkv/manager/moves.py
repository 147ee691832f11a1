"""Block moves that are decided but not yet made: copies inside the pool and swaps with a host pool.

They are applied in the order swap-outs, copies, swap-ins, then the step's writes: a block that a swap-out reads may be
handed out in the same step. The sources of copies are pinned until the copies are taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pagedkv.manager.blocks import Blocks, require

BlockPairs = list[tuple[int, int]]


class HostPool:
    """Reference-counted host blocks 0 .. num_blocks-1, the last freed reused first."""

    def __init__(self, num_blocks: int) -> None:
        self.refs = [0] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))

    def take(self) -> int:
        block = self.free.pop()
        self.refs[block] = 1
        return block

    def acquire(self, block: int) -> None:
        self.refs[block] += 1

    def release(self, block: int) -> bool:
        """Drop a reference; True when it was the last."""
        self.refs[block] -= 1
        if not self.refs[block]:
            self.free.append(block)
        return not self.refs[block]


class Moves:
    """Pending moves by destination; each names the block that holds the content before any of them is applied."""

    def __init__(self, blocks: Blocks, num_host_blocks: int) -> None:
        self.blocks = blocks
        self.host = HostPool(num_host_blocks)
        self.copies: dict[int, int] = {}
        self.swap_ins: dict[int, int] = {}
        self.swap_outs: dict[int, int] = {}
        self.num_copies = 0

    def is_pending(self, block: int) -> bool:
        return block in self.copies or block in self.swap_ins

    def __bool__(self) -> bool:
        return bool(self.copies or self.swap_ins)

    def copy(self, source: int, destination: int) -> None:
        host = self.swap_ins.get(source)
        if host is not None:
            self.swap_in(host, destination)
            return
        source = self.copies.get(source, source)
        self.copies[destination] = source
        self.blocks.pin(source)
        self.num_copies += 1

    def swap_in(self, host: int, destination: int) -> None:
        self.swap_ins[destination] = host
        self.host.acquire(host)

    def num_host_needed(self, blocks: list[int]) -> int:
        return sum(1 for block in blocks if block not in self.swap_ins)

    def swap_out(self, block: int) -> int:
        """A host block, referenced for the caller, that holds what `block` holds once the moves are applied."""
        host = self.swap_ins.get(block)
        if host is not None:
            self.host.acquire(host)
            return host
        host = self.host.take()
        self.swap_outs[host] = self.copies.get(block, block)
        return host

    def drop_hosts(self, hosts: Iterable[int]) -> None:
        """Give back host blocks; what was to go out into them has to no more. -1 stands for a null block."""
        for host in hosts:
            if host >= 0 and self.host.release(host):
                self.swap_outs.pop(host, None)

    def drop(self, destination: int) -> None:
        """The destination has no owner left: its content is not wanted."""
        source = self.copies.pop(destination, None)
        if source is not None:
            self.blocks.unpin(source)
        host = self.swap_ins.pop(destination, None)
        if host is not None:
            self.drop_hosts((host,))

    def take_copies(self) -> BlockPairs:
        pairs = [(source, destination) for destination, source in self.copies.items()]
        self.copies.clear()
        for source, _ in pairs:
            self.blocks.unpin(source)
        return pairs

    def take_swaps(self) -> tuple[BlockPairs, BlockPairs]:
        outs = [(source, host) for host, source in self.swap_outs.items()]
        ins = [(host, destination) for destination, host in self.swap_ins.items()]
        self.swap_outs.clear()
        self.swap_ins.clear()
        self.drop_hosts(host for host, _ in ins)
        return outs, ins

    def check_integrity(self, host_references: list[int]) -> None:
        """host_references: how many sequences hold each host block."""
        pins = Counter(self.copies.values())
        require(pins == self.blocks.pins, f"pins {self.blocks.pins} are not those of the pending copies {pins}")
        for destination in (*self.copies, *self.swap_ins):
            is_open = self.blocks.refs[destination] > 0 and not self.blocks.is_published(destination)
            require(is_open, f"pending destination {destination} is free or published")
        expected = Counter(self.swap_ins.values())
        expected.update(dict(enumerate(host_references)))
        refs = self.host.refs
        require(list(refs) == [expected[host] for host in range(len(refs))], "host references are counted wrongly")
        free = [host for host, count in enumerate(refs) if not count]
        require(sorted(self.host.free) == free, "the free host blocks are not those without a reference")
        require(all(refs[host] for host in self.swap_outs), "a swap-out goes to a free host block")
