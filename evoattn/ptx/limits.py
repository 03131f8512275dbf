"""What the interpreter does not model, said here and nowhere else: what "right on the interpreter" leaves to the
device."""

NOT_MODELLED = (
    "machine code: it runs PTX, so faults of ptxas, register counts and time are not seen",
    "the last bits of approximate functions, of sums inside tensor-core products, and denormals flushed by .ftz "
    "beyond exp2",
    "every order of execution: races, who may meet at a named barrier and which phase of an mbarrier an arrival falls "
    "in do not depend on who runs first, but which block draws which tile, and which one arrives last, is one case",
    "how many blocks a GPU has room for: blocks of 4,096 threads in all run at once, and one of these that polls "
    "global memory for a later one gets its answer; one that polls for a block behind them is a deadlock",
    "lanes of a warp one by one in fences of the GPU: what one lane releases or acquires, its warp does",
    "threads of a warp that stay apart after a branch with plain accesses and arrivals alone: where their paths meet, "
    "they are taken to have met, also before .aligned instructions",
    "when the global writes of a tensor store arrive: they count as done when they are issued",
    "a fence before a relaxed arrival at a cluster's barrier, but for that of mbarrier initializations; clusters not "
    "along x; multicast",
    "atomics on shared memory as a cause of races, and aliases of global memory by another proxy than the generic one",
    "launches that overlap: one runs after another has ended, and what is read before it waits is checked by buffer, "
    "not by byte",
)
"""One thing each, as it would follow "The interpreter does not model"."""
