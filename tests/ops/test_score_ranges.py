"""Between what numbers an expression lies over blocks of queries and keys, as `score_range.cuh` has it, on the
interpreter, beside Python's numbers."""

import pytest
import torch

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.families.includes import resolve
from evoattn.model.launch import Buffer, KernelLaunch
from evoattn.model.paths import TEMPLATES
from tests.support.compiles import ptx_kept

LEAST, MOST, SIZE = -(1 << 31), (1 << 31) - 1, 5
ANYTHING = LEAST, MOST
BOUNDS = LEAST, -70_000, -7, -2, -1, 0, 1, 2, 9, 33, 70_000, MOST
OF_RANGES = {
    "lesser_of(x, y)": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "greater_of(x, y)": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "sum_of(x, y)": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "difference_of(x, y)": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "negative_of(x)": lambda x, y: (-x[1], -x[0]),
    "size_of(x)": lambda x, y: (max(x[0], -x[1], 0), max(abs(x[0]), abs(x[1]))),
    "product_of(x, y)": lambda x, y: ends(a * b for a in x for b in y),
    "quotient_of(x, y)": lambda x, y: (x[0] // y[0], x[1] // y[0]) if is_one(y, 1, MOST) else ANYTHING,
    "remainder_of(x, y)": lambda x, y: remainders(x, y[0]) if is_one(y, 1, MOST) else ANYTHING,
    "shifted(x, y)": lambda x, y: (x[0] >> y[0], x[1] >> y[0]) if is_one(y, 0, 31) else ANYTHING,
    "common_bits(x, y)": lambda x, y: bits(x, y),
    "is_not(is_less(x, y))": lambda x, y: (x[0] >= y[1], x[1] >= y[0]),
    "is_less(x, y)": lambda x, y: (x[1] < y[0], x[0] < y[1]),
    "is_at_most(x, y)": lambda x, y: (x[1] <= y[0], x[0] <= y[1]),
    "is_equal(x, y)": lambda x, y: (x[0] == x[1] == y[0] == y[1], x[0] <= y[1] and y[0] <= x[1]),
    "either_of(is_less(x, y), x, y)": lambda x, y: x if x[1] < y[0] else y if x[0] >= y[1] else ends((*x, *y)),
    f"inside(x, {SIZE}, false)": lambda x, y: tuple(min(max(at, 0), SIZE - 1) for at in x),
    f"inside(x, {SIZE}, true)": lambda x, y: wrapped(x),
}
"""Between what an operator's result lies, by Python's numbers without an end; anything where that is no int."""


def ends(numbers):
    found = list(numbers)
    return min(found), max(found)


def is_one(y, least, most):
    return y[0] == y[1] and least <= y[0] <= most


def remainders(x, y):
    return (x[0] % y, x[1] % y) if x[0] // y == x[1] // y else (0, y - 1)


def bits(x, y):
    if x[0] == x[1] and y[0] == y[1]:
        return (x[0] & y[0],) * 2
    return (0, min(x[1], y[1])) if x[0] >= 0 and y[0] >= 0 else ANYTHING


def wrapped(x):
    if x[0] < 0 <= x[1]:
        return 0, SIZE - 1
    return tuple(min(max(at + (SIZE if at < 0 else 0), 0), SIZE - 1) for at in x)


@pytest.mark.slow
def test_what_lies_between_two_numbers_stays_between_those_of_its_operators():
    headers = ("device/ptx/element.cuh", "device/score.cuh", "device/score_range.cuh")
    lines = [f"keep(found + {2 * n}, {text});" for n, text in enumerate(OF_RANGES)]
    text = "\n".join(
        (
            *(f'#include "{name}"' for name in headers),
            "__device__ void keep(int* at, Range range) { at[0] = range.low, at[1] = range.high; }",
            'extern "C" __global__ void ranges(const int* given, int* all) {',
            "const int number = blockIdx.x * blockDim.x + threadIdx.x;",
            "const int* own = given + 4 * number;",
            f"int* found = all + {2 * len(OF_RANGES)} * number;",
            "const Range x{own[0], own[1]}, y{own[2], own[3]};",
            *lines,
            "}\n",
        )
    )
    ranges = [(low, high) for low in BOUNDS for high in BOUNDS if low <= high]
    pairs = [(x, y) for x in ranges for y in ranges]
    count = -(-len(pairs) // 128)
    given = torch.zeros(count * 128, 4, dtype=torch.int32)
    given[: len(pairs)] = torch.tensor([(*x, *y) for x, y in pairs], dtype=torch.int32)
    found = torch.zeros(count * 128, len(OF_RANGES), 2, dtype=torch.int32)
    launch = KernelLaunch("ranges", (count, 1, 1), (128, 1, 1), 0, (Buffer("given"), Buffer("all")))
    kernel = ptx_kept(resolve(text, TEMPLATES), "sm_90a")
    assert not InterpreterBackend().run(kernel, (launch,), {"given": given, "all": found})
    for (x, y), row in zip(pairs, found.tolist(), strict=False):
        for name, one in zip(OF_RANGES, row, strict=True):
            low, high = map(int, OF_RANGES[name](x, y))
            assert tuple(one) == (ANYTHING if low < LEAST or high > MOST else (low, high)), (name, x, y)


ALONE = 0, 1
"""How far rows lie from each other, and how many there are, of one."""
OF_LINES = {
    "one for all": ([(3, 2, 40, *ALONE)] * 32, (13, 91)),
    "as many as are looked at": ([(0, 1, 4096, *ALONE)] * 32, (10, 4105)),
    "one more": ([(0, 1, 4097, *ALONE)] * 32, ANYTHING),
    "rows": ([(7, 2, 40, 100, 5)] * 32, (17, 495)),
    "rows of too many": ([(0, 1, 1025, 1, 4)] * 32, ANYTHING),
    "along more": ([(3, 2, 0, 1, 40)] * 32, ANYTHING),
    "an element each": ([(7 * lane, 0, 1, *ALONE) for lane in range(32)], None),
    "other first elements": ([(lane // 31, 1, 40, *ALONE) for lane in range(32)], ANYTHING),
    "other steps": ([(0, 1 + lane // 31, 40, *ALONE) for lane in range(32)], ANYTHING),
    "other counts": ([(0, 1, 1 + lane // 8, *ALONE) for lane in range(32)], ANYTHING),
    "other rows": ([(0, 1, 40, 9, 1 + lane // 31) for lane in range(32)], ANYTHING),
    "rows elsewhere": ([(0, 1, 40, 9 + lane // 31, 3) for lane in range(32)], ANYTHING),
}
"""By name (first, step, count, far, rows) of each lane in a table of 10, 11, 12, …, and between what the elements lie.
"""
ROW = 144
OF_FLAGS = {
    "words of ones": (20 * ROW + 32, 1, 64, ROW, 33),
    "one row of them": (60 * ROW + 32, 1, 64, *ALONE),
    "words of zeros": (20 * ROW, 1, 32, ROW, 40),
    "rows that begin within words": (20 * ROW + 64, 1, 32, ROW - 1, 33),
    "flags of ones": (21 * ROW + 33, 1, 63, ROW, 39),
    "every other flag": (21 * ROW + 34, 2, 31, 2 * ROW, 20),
    "flags of zeros": (1, 1, 31, ROW, 80),
    "wide words": (20 * ROW, 1, 41 * ROW, *ALONE),
    "a last one": (0, 1, 20 * ROW + 33, *ALONE),
    "no last one": (0, 1, 20 * ROW + 32, *ALONE),
}
"""Lines of a table of so long rows whose flags are set in 41 rows from row 20 on and 64 columns from column 32 on."""


@pytest.mark.slow
def test_between_what_the_elements_of_a_table_lie():
    """Lanes that are not known to ask alike have one row."""
    headers = ("device/ptx/element.cuh", "device/score.cuh", "device/score_range.cuh")
    text = "\n".join(
        (
            *(f'#include "{name}"' for name in headers),
            "template <bool ALIKE, typename Element>",
            "__device__ void find(const Element* table, const int* given, int* all) {",
            "const int number = blockIdx.x * 32 + threadIdx.x;",
            "given += 5 * number;",
            "const Line line{given[0], given[1], given[2], given[3], given[4]};",
            "const Range found = elements_of<ALIKE>(table, line, threadIdx.x);",
            "all[2 * number] = found.low, all[2 * number + 1] = found.high;",
            "}",
            *(
                f'extern "C" __global__ void of_{of}_{alike}(const {of}* table, const int* given, int* all) '
                f"{{ find<{alike}>(table, given, all); }}"
                for of in ("int", "bool")
                for alike in (0, 1)
            ),
        )
    )
    kernel = ptx_kept(resolve(text, TEMPLATES), "sm_90a")

    def found_of(table, lines, alike):
        given, found = torch.tensor(lines, dtype=torch.int32), torch.zeros(len(lines), 32, 2, dtype=torch.int32)
        buffers = {"table": table, "given": given, "all": found}
        name = f"of_{'bool' if table.dtype == torch.bool else 'int'}_{int(alike)}"
        launch = KernelLaunch(name, (len(lines), 1, 1), (32, 1, 1), 0, tuple(map(Buffer, buffers)))
        assert not InterpreterBackend().run(kernel, (launch,), buffers)
        return found.tolist()

    numbers, flags = torch.arange(10, 5010, dtype=torch.int32), torch.zeros(90, ROW, dtype=torch.bool)
    flags[20:61, 32:96] = True
    for alike in (False, True):
        lines = {name: one for name, one in OF_LINES.items() if not alike or one[0] == one[0][:1] * 32}
        found = found_of(numbers, [lanes for lanes, _ in lines.values()], alike)
        for (name, (given, lies)), lanes in zip(lines.items(), found, strict=True):
            lies = lies if alike or given[0][4] == 1 else ANYTHING
            assert lanes == [list(lies or (10 + 7 * lane,) * 2) for lane in range(32)], name
        found = found_of(flags, [[line] * 32 for line in OF_FLAGS.values()], alike)
        for (name, (first, step, count, far, rows)), lanes in zip(OF_FLAGS.items(), found, strict=True):
            own = flags.flatten().as_strided((rows, count), (far, step), first)
            assert lanes == [[own.all(), own.any()] if alike or rows == 1 else [0, 1]] * 32, name
    for odd in (False, True):  # one flag of a box, wherever it lies
        boxes = [(row, column) for row in range(37) for column in (0, 21, 25, 47)]
        flags = torch.full((len(boxes), 40, 48), not odd)
        for box, place in zip(flags, boxes, strict=True):
            box[place] = odd
        for left in (0, 1):  # of words, and of flags
            lines = [[(box * 40 * 48 + left, 1, 48 - left, 48, 37)] * 32 for box in range(len(boxes))]
            for (_, column), lanes in zip(boxes, found_of(flags, lines, True), strict=True):
                assert lanes == [[not odd] * 2 if column < left else [0, 1]] * 32
