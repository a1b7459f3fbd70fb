"""Static input buffers keep their addresses and refuse what they were not made for."""

import pytest
import torch

from compiled_dsa.graphs import buffers
from compiled_dsa.graphs.buffers import Call, CaptureError, StaticInputs
from tests.graphs.toys import Counter


def make_call(batch: int = 2, flag: bool = True, dtype=torch.float32, state=None, value: float = 1.0, **more) -> Call:
    x = torch.full((batch, 3), value, dtype=dtype)
    return Call((x,), {"mask": {"a": None, "b": torch.full((batch,), value)}, "flag": flag, "s": state, **more})


def test_static_tensors_keep_their_addresses_and_take_new_values():
    state = Counter(device="cpu")
    inputs = StaticInputs(make_call(state=state))
    args, kwargs = inputs.arguments(make_call(state=state))
    addresses = args[0].data_ptr(), kwargs["mask"]["b"].data_ptr()
    other = make_call(state=state, value=7.0)
    inputs.fill(other)
    again_args, again_kwargs = inputs.arguments(other)
    assert (again_args[0].data_ptr(), again_kwargs["mask"]["b"].data_ptr()) == addresses
    assert args[0].eq(7).all() and kwargs["mask"]["b"].eq(7).all()
    assert again_kwargs["s"] is state and again_kwargs["flag"] is True and again_kwargs["mask"]["a"] is None


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"batch": 3}, r"\[0\]\[0\].*\(3, 3\).*\(2, 3\)"),
        ({"dtype": torch.float64}, r"float64.*float32"),
        ({"flag": False}, r"'flag'.*False.*True"),
    ],
)
def test_another_kind_of_call_is_refused_by_name(other, named):
    inputs = StaticInputs(make_call())
    with pytest.raises(ValueError, match=named):
        inputs.fill(make_call(**other))
    args, _ = inputs.arguments(make_call())
    assert args[0].eq(1).all()  # nothing was copied


def test_another_structure_is_refused():
    inputs = StaticInputs(make_call())
    with pytest.raises(ValueError, match="structure"):
        inputs.fill(make_call(more=1))


def test_what_a_smaller_call_leaves_of_a_buffer_holds_the_idle_values(monkeypatch):
    """Of shapes whose views are new, kept, and made again after they were dropped."""
    monkeypatch.setattr(buffers, "_SHAPES_KEPT", 3)
    idle = Call((torch.full((4, 5, 2), -1.0),), {})
    inputs = StaticInputs(idle)
    for shape in ((4, 5, 2), (2, 5, 2), (4, 5, 2), (3, 2, 1), (0, 5, 2), (1, 1, 2), (2, 5, 2), (1, 1, 2)):
        given = torch.rand(shape)
        inputs.fill(Call((given,), {}))
        (held,), _ = inputs.arguments(idle)
        expected = torch.full((4, 5, 2), -1.0)
        expected[tuple(slice(size) for size in shape)] = given
        assert torch.equal(held, expected)


@pytest.mark.parametrize("leaf", [{1, 2}, object(), torch.nn.Linear(1, 1)])
def test_objects_that_might_hold_tensors_are_refused(leaf):
    with pytest.raises(CaptureError, match=type(leaf).__name__):
        make_call(more=leaf)


def test_buffers_made_in_inference_mode_are_refilled_outside_of_it():
    with torch.inference_mode():
        inputs = StaticInputs(make_call())
    inputs.fill(make_call(value=5.0))
    args, _ = inputs.arguments(make_call())
    assert args[0].eq(5).all()


def test_calls_share_a_key_exactly_when_one_graph_serves_both():
    state, other_state = Counter(device="cpu"), Counter(device="cpu")
    key = make_call(state=state).key
    assert key == make_call(state=state, value=3.0).key
    others = [{"batch": 3}, {"flag": False}, {"flag": 1}, {"state": other_state}]
    assert len({key, *(make_call(**{"state": state, **other}).key for other in others)}) == 5
    state.facts = "scaled"
    assert make_call(state=state).key != key


def test_calls_of_one_bucket_share_a_key_whatever_their_sizes():
    def key(rows: int, bucket: int, dtype=torch.float32):
        return Call((torch.zeros(rows, 3, dtype=dtype),), {}, bucket).key

    assert key(2, 8) == key(5, 8)
    assert len({key(2, 8), key(2, 16), key(2, 8, torch.float64)}) == 3
