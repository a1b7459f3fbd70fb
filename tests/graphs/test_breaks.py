"""Split ops between segments: what they see of padded tensors, and what padding rows hold after them."""

import torch
from torch import Tensor

from compiled_dsa.custom_ops.capture import BreakCall
from compiled_dsa.graphs.capture import Break, Recording

PADDED = 6


class Seen:
    """A split op that notes the rows of its arguments and writes 1 to the last one."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.args: list[tuple] = []

    def __call__(self, *args) -> None:
        self.rows.append([a.shape[0] for a in args if isinstance(a, Tensor)])
        self.args.append(args)
        args[-1].fill_(1)


def recording(rows: dict[int, float | None]) -> tuple[Seen, tuple, Recording]:
    """Two calls of one op on the same arguments, and these."""
    seen, args = Seen(), (torch.zeros(PADDED, 2), "constant", torch.zeros(4), torch.zeros(PADDED, 3))
    breaks = [Break(BreakCall("toy", seen, args, rows), PADDED) for _ in range(2)]
    return seen, args, Recording(breaks, PADDED, None)


def test_ops_see_the_real_rows_and_padding_rows_are_filled():
    seen, args, replayed = recording({0: None, 2: None, 3: -1.0})
    for rows in (4, 2, None, 3, 3, PADDED, 0):
        args[3].fill_(7)
        replayed.replay(rows)
        real = PADDED if rows is None else rows
        assert seen.rows[-2:] == [[real, 4, real]] * 2  # a tensor with other rows than the call is no tensor of rows
        assert (args[3][:real] == 1).all() and (args[3][real:] == -1).all()


def test_ops_without_rows_see_all_of_them():
    seen, args, replayed = recording({})
    replayed.replay(2)
    assert seen.rows == [[PADDED, 4, PADDED]] * 2 and (args[3] == 1).all()


def test_a_tensor_is_cut_once_for_all_ops_until_the_rows_change():
    seen, args, replayed = recording({0: None, 3: 0.0})
    replayed.replay(4)
    replayed.replay(4)
    assert all(a is b for other in seen.args[1:] for a, b in zip(seen.args[0], other))
    replayed.replay(5)
    assert seen.args[-1][0] is not seen.args[0][0] and seen.args[-1][0].data_ptr() == args[0].data_ptr()
