"""Races of the asynchronous proxy (sm_90): tensor copies and wgmma access shared memory as agents beside the threads
that issue them.

The agents of a cluster, in this order: for each warpgroup of each block its matrix products, which read; for each warp
its tensor stores, which read; for each mbarrier the copies that complete on it (of the tensor engine, or stores from
other blocks), which write.

What a thread does is ordered after an access by an agent once its warp knows of that time of the agent: through
`wgmma.wait_group`, `cp.async.bulk.wait_group`, a wait for the mbarrier's phase, or a warp that has so waited. What an
agent does is ordered after what its issuing threads know. Besides, a thread's write before an agent's access, and its
read before an agent's write, must have been followed by its own `fence.proxy.async` before the agent's access was
ordered after it (PTX ISA, memory consistency model, proxy-preserved base causality order). An H200 does overwrite what
ldmatrix has not yet read, where the warp has only arrived on the producer's mbarrier."""

import numpy as np

from evoattn.ptx.errors import UnsupportedInstruction
from evoattn.ptx.program.kernel import Instruction, Mask, Numbers
from evoattn.ptx.program.threads import WARP, ActiveThreads, Threads
from evoattn.ptx.races.happens_before import SEVERAL
from evoattn.ptx.races.shared_accesses import LANE_BITS, LANE_MASK, THREAD_BITS, THREAD_MASK, SharedRaces

WARPGROUP_WARPS = 4
CHUNK = 16
"""Bytes, eight elements: what swizzling moves in one piece."""
MAX_MBARRIERS = 256
"""Of a block that are watched."""
_ALWAYS = 1 << 39
"""Later than any time, and before that of a block that has ended."""
Granules = slice | Numbers


def agent_names(threads: Threads) -> tuple[list[str], int]:
    """Names of the agents of one cluster, and how many of them read."""
    products = [f"a wgmma of warpgroup {i}" for i in range(-(-threads.block_warps // WARPGROUP_WARPS))]
    stores = [f"a tensor store of warp {i}" for i in range(threads.block_warps)]
    readers = [*products, *stores] * threads.cluster
    return [*readers, *["an asynchronous copy"] * (MAX_MBARRIERS * threads.cluster)], len(readers)


def _different(stamps: Numbers) -> list[int]:
    """Those that there are, ascending. Neighbours are mostly of one access, so that few differ from the one before."""
    (changes,) = (stamps[1:] != stamps[:-1]).nonzero()
    return sorted({int(stamps[0]), *stamps[changes + 1].tolist()}) if len(changes) else [int(stamps[0])]


def _lane_bits(lanes: Mask) -> int:
    """Bool `[32]` → a bit for each."""
    return int(np.packbits(lanes, bitorder="little").view(np.uint32)[0])


class AsyncRaces:
    """What the asynchronous proxy tells a `SharedRaces`. Issuers are actors: threads, or warps from `threads.count`
    on."""

    def __init__(self, detector: SharedRaces) -> None:
        self.detector, self.order, self.threads = detector, detector.order, detector.threads
        self._first_store = -(-self.threads.block_warps // WARPGROUP_WARPS)
        self._block_readers = self._first_store + self.threads.block_warps
        self._of_products = np.array([self.products(warp) for warp in range(self.threads.warp_count)])
        self._mbarriers: dict[tuple[int, str], int] = {}
        self._fences: dict[int, list[tuple[int, int]]] = {}  # by warp: (time, bits of the lanes)
        self._known_ordered: set[tuple[int, int]] = set()  # (first issuer, stamp of a write)
        self._known_fenced: set[tuple[int, int, int]] = set()  # (issuer, column, stamp of a read)
        self._last_copy: dict[tuple[int, int], tuple[int, Instruction]] = {}  # by block and agent

    # ---- agents

    def products(self, warp: int) -> int:
        """The agent of matrix products of a warp's warpgroup."""
        rank, own = divmod(warp % self.threads.cluster_warps, self.threads.block_warps)
        return rank * self._block_readers + own // WARPGROUP_WARPS

    def stores(self, warp: int) -> int:
        """The agent of tensor stores of a warp."""
        rank, own = divmod(warp % self.threads.cluster_warps, self.threads.block_warps)
        return rank * self._block_readers + self._first_store + own

    def copies(self, block: int, offset: int, what: str = "a tensor copy") -> int:
        """The agent of copies of a kind that complete on the mbarrier at this byte of a block's shared memory.

        Raises `UnsupportedInstruction` beyond MAX_MBARRIERS."""
        key = offset, what
        number = self._mbarriers.get(key)
        if number is None:
            number = self._mbarriers[key] = len(self._mbarriers)
            if number == MAX_MBARRIERS:
                raise UnsupportedInstruction(
                    f"More than {MAX_MBARRIERS} mbarriers in a block are outside the interpreter's whitelist."
                )
        agent = self.threads.cluster * self._block_readers + block % self.threads.cluster * MAX_MBARRIERS + number
        self.detector.actors.agents[agent] = f"{what} to the mbarrier at byte {offset}"
        return agent

    # ---- what it is told

    def fence(self, active: ActiveThreads) -> None:
        """`fence.proxy.async` by these threads."""
        order = self.detector.synchronize()
        for warp in active.warps.tolist():
            self._fences.setdefault(warp, []).append((order.now, _lane_bits(active.by_warp[warp])))
        order.now += 1

    def read(self, agent: int, issuers: Numbers, granules: Granules, ins: Instruction) -> None:
        """An agent reads granules of the issuers' block, from now until its issuers wait for it."""
        self.detector.check()
        self._check_against_writes("reads", issuers, granules, ins)
        column, block = (
            self.threads.cluster_warps + agent,
            int(self.order.warp_of[issuers[0]]) // self.threads.block_warps,
        )
        self.detector.reads.mark(column, block, granules, self.order.now << LANE_BITS | SEVERAL)

    def read_by_products(self, leads: Numbers, chunks: Numbers, ins: Instruction) -> None:
        """The matrix products of the warpgroups that have these first warps read chunks of 16 bytes, `[warpgroup,
        chunk]`, from now until their warpgroup waits for them."""
        self.detector.check()
        granules = CHUNK >> self.detector.shift
        written = self.detector.last_write.reshape(-1, granules)[chunks].reshape(len(leads), -1)
        known = self._known_ordered if (written == written[:, :1]).all() else ()
        for i, (lead, stamp) in enumerate(zip(leads.tolist(), written[:, 0].tolist())):
            issuer = self.threads.count + lead
            if (issuer, stamp) not in known:
                self._check_stamps("reads", issuer + np.arange(WARPGROUP_WARPS), written[i], ins)
            if self.detector.copies and self.detector.in_flight.reshape(-1, granules)[chunks[i]].any():
                self._tell_copy(issuer, "reads", ins)
        stamp = self.order.now << LANE_BITS | SEVERAL
        columns = self.threads.cluster_warps + self._of_products[leads]
        self.detector.reads.mark_chunks(columns, leads // self.threads.block_warps, chunks, stamp)

    def write(
        self, agent: int, issuer: int, granules: Granules, ins: Instruction, block: int, proxied: bool = True
    ) -> None:
        """An agent writes granules of a block, from now until the phase of its mbarrier ends; not `proxied`: as threads
        write."""
        self.detector.check()
        self.detector.reads.record([np.array([block])])
        self._check_against_writes("overwrites", np.array([issuer]), granules, ins, proxied)
        self._check_against_reads(issuer, granules, ins, block, proxied)
        self.detector.last_write[granules] = self.order.now << THREAD_BITS | self.order.first_agent + agent
        self.detector.newest_write[block] = _ALWAYS
        self._last_copy[block, agent] = self.order.now, ins

    def retire(self, blocks: Numbers) -> None:
        """All threads of these blocks have exited: somebody must have waited for every copy to their shared memory."""
        for (block, agent), (time, ins) in list(self._last_copy.items()):
            if block in blocks:
                warps = np.arange(block * self.threads.block_warps, (block + 1) * self.threads.block_warps)
                if time > self.order.known_by_any(warps, self.threads.cluster_warps + agent):
                    copy = self.detector.actors.agents[agent]
                    self.detector.report(
                        ins, f"block {block + self.threads.first_block} ends and nobody has waited for {copy}"
                    )
                del self._last_copy[block, agent]

    # ---- checking

    def _check_against_writes(
        self, verb: str, issuers: Numbers, granules: Granules, ins: Instruction, proxied: bool = True
    ) -> None:
        self._check_stamps(verb, issuers, self.detector.last_write[granules], ins, proxied)
        if self.detector.copies and self.detector.in_flight[granules].any():
            self._tell_copy(int(issuers[0]), verb, ins)

    def _check_stamps(
        self, verb: str, issuers: Numbers, stamps: Numbers, ins: Instruction, proxied: bool = True
    ) -> None:
        """Of the last writes to what an agent accesses now."""
        first = int(issuers[0])
        unknown = [stamp for stamp in _different(stamps) if stamp and (first, stamp) not in self._known_ordered]
        if not unknown:
            return
        made = [(stamp >> THREAD_BITS, stamp & THREAD_MASK) for stamp in unknown]
        for stamp, (_, writer), wrong in zip(unknown, made, self._why_unordered(made, issuers, proxied)):
            if wrong:
                self._tell(first, verb, f"what {self.detector.actors.name(writer)} wrote last, {wrong}", ins)
            else:
                self._known_ordered.add((first, stamp))

    def _why_unordered(self, made: list[tuple[int, int]], issuers: Numbers, proxied: bool) -> list[str]:
        """What is missing between each access, of (time, actor), and an agent's access that these actors issue now; an
        empty string if nothing is. All that clocks have to tell is asked of them at once."""
        found, asked = [""] * len(made), list[tuple[int, int, int]]()
        warps = self.order.warp_of[issuers]
        floor = self.order.block_floor[warps[0] // self.threads.block_warps]
        for i, (time, actor) in enumerate(made):
            if actor >= self.order.first_agent:
                if np.count_nonzero(self.order.clock[warps, self.order.column_of[actor]] < time):  # most are ordered
                    asked.append((i, time, actor))
            elif (fenced := self._fenced(actor, time) if proxied else time) is None:
                found[i] = "with no fence.proxy.async between"
            elif fenced > floor:
                asked.append((i, fenced, actor))
        if asked:
            places, times, actors = np.repeat(np.array(asked).T, len(issuers), axis=1)
            columns, lanes = self.order.column_of[actors], self.order.lane_of[actors]
            late = self.order.unordered(np.tile(issuers, len(asked)), columns, lanes, times)
            for i in set(places[late].tolist()):
                found[i] = "with no barrier between"
        return found

    def _fenced(self, writer: int, time: int) -> int | None:
        """When the first fence of a thread (of all threads of a warp) after `time` was complete; None if it was not."""
        lane, warp = int(self.order.lane_of[writer]), int(self.order.warp_of[writer])
        wanted = 1 << lane if lane != SEVERAL else _lane_bits(self.threads.exists.reshape(-1, WARP)[warp])
        for at, lanes in self._fences.get(warp, ()):
            if at >= time:
                wanted &= ~lanes
                if not wanted:
                    return at
        return None

    def _check_against_reads(
        self, issuer: int, granules: Granules, ins: Instruction, target: int, proxied: bool
    ) -> None:
        order, detector = self.order, self.detector
        warp, lane = int(order.warp_of[issuer]), int(order.lane_of[issuer])
        block, own = warp // self.threads.block_warps, warp % self.threads.cluster_warps
        used, reads = detector.reads.last(granules)
        columns = detector.reads.columns_of(used, target)
        of_warps = columns < self.threads.cluster_warps
        knowledge = order.known_to(issuer)
        known = knowledge.known[: self.threads.cluster_warps]
        np.maximum(known, order.block_floor[block], out=known)
        late = reads.max(1, initial=0) >> LANE_BITS > knowledge.known[columns]
        for i in np.flatnonzero(late).tolist() if knowledge.lanes else []:
            column, stamps = int(columns[i]), _different(reads[i])
            late[i] = not all(knowledge.covers(column, s & LANE_MASK, s >> LANE_BITS) for s in stamps)
        for i in np.flatnonzero(columns == own).tolist():
            late[i] = ((reads[i] >> LANE_BITS > order.warp_floor[warp]) & (reads[i] & LANE_MASK != lane)).any()
        for column in np.sort(columns[late]).tolist():
            self._tell(
                issuer,
                "overwrites",
                f"what {detector.actors.name_of_column(column)} has read, with no barrier between",
                ins,
            )
        if proxied and not np.count_nonzero(late):
            self._check_fences_after(columns[of_warps], reads[of_warps], issuer, warp - own, ins)

    def _check_fences_after(
        self, columns: Numbers, reads: Numbers, issuer: int, first_warp: int, ins: Instruction
    ) -> None:
        """Of reads by warps of a cluster, `[warp, granule]`: each needs a fence of its proxy before the issuer's
        write."""
        for column, row in zip(columns.tolist(), reads):
            for stamp in _different(row):
                key = issuer, column, stamp
                if stamp == 0 or key in self._known_fenced:
                    continue
                time, lane, warp = stamp >> LANE_BITS, stamp & LANE_MASK, first_warp + column
                reader = self.threads.count + warp if lane == SEVERAL else warp * WARP + lane
                (wrong,) = self._why_unordered([(time, reader)], np.array([issuer]), True)
                if wrong:
                    self._tell(issuer, "overwrites", f"what {self.detector.actors.name(reader)} has read, {wrong}", ins)
                else:
                    self._known_fenced.add(key)

    def _tell_copy(self, issuer: int, verb: str, ins: Instruction) -> None:
        self._tell(issuer, verb, "an asynchronous copy that its thread has not yet waited for", ins)

    def _tell(self, issuer: int, verb: str, what: str, ins: Instruction) -> None:
        block = int(self.order.warp_of[issuer]) // self.threads.block_warps + self.threads.first_block
        by = "an asynchronous store of" if ins.opcode.startswith("st.") else "the asynchronous proxy for"
        self.detector.report(ins, f"{by} {self.detector.actors.name(issuer)} of block {block} {verb} {what}")
