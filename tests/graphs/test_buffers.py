"""Static input buffers keep their addresses and refuse what they were not made for."""

import pytest
import torch

from compiled_dsa.graphs.buffers import StaticInputs, call_key


def call(batch: int = 2, flag: bool = True, dtype: torch.dtype = torch.float32, state: object = None):
    return (torch.ones(batch, 3, dtype=dtype),), {
        "mask": {"a": None, "b": torch.zeros(batch)},
        "flag": flag,
        "s": state,
    }


def test_static_tensors_keep_their_addresses_and_take_new_values():
    state = object()
    inputs = StaticInputs(*call(state=state), state)
    (args, kwargs) = inputs.call(*call(state=state))
    addresses = args[0].data_ptr(), kwargs["mask"]["b"].data_ptr()
    new_args, new_kwargs = call(state=state)
    new_args[0].fill_(7)
    new_kwargs["mask"]["b"].fill_(9)
    inputs.fill(new_args, new_kwargs, state)
    again_args, again_kwargs = inputs.call(new_args, new_kwargs)
    assert (again_args[0].data_ptr(), again_kwargs["mask"]["b"].data_ptr()) == addresses
    assert torch.equal(args[0], new_args[0]) and torch.equal(kwargs["mask"]["b"], new_kwargs["mask"]["b"])
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
    inputs = StaticInputs(*call(), None)
    with pytest.raises(ValueError, match=named):
        inputs.fill(*call(**other), None)


def test_another_structure_is_refused():
    inputs = StaticInputs(*call(), None)
    args, kwargs = call()
    with pytest.raises(ValueError, match="structure"):
        inputs.fill(args, {**kwargs, "more": 1}, None)


def test_calls_share_a_key_exactly_when_one_graph_serves_both():
    state, other_state = object(), object()
    key = call_key(*call(state=state), state)
    assert key == call_key(*call(state=other_state), other_state)
    assert len({key, *(call_key(*call(**k), None) for k in ({"batch": 3}, {"flag": False}))}) == 3
