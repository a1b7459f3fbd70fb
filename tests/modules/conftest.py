"""Fixtures of the module tests."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tensors are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before, so that compiles can be counted."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
