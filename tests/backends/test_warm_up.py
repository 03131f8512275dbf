"""What is loaded beside a GPU worker's imports."""

import torch

from evoattn.backends.warm_up import load_products


def test_products_of_each_dtype_are_made_where_it_is_said():
    made = []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.softmax:
                made.append((args[0].device.type, args[0].dtype))
            return function(*args, **(kwargs or {}))

    with Watched():
        load_products("cpu", "float32", "float64")
    assert made == [("cpu", torch.float32), ("cpu", torch.float64)]


def test_a_device_that_is_not_there_is_not_said_here():
    load_products("cuda:99", "float32")
