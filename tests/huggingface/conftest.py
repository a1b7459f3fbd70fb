"""Fixtures: a stock model beside a converted one with the same weights."""

import copy

import pytest

from compiled_dsa.huggingface import replace_attention
from tests.huggingface.tiny_models import MODEL_TYPES, Pair, make_pair


@pytest.fixture(scope="session")
def pairs() -> dict[str, Pair]:
    """One pair a model type, shared by all tests, which must leave them as they are."""
    return {model_type: make_pair(model_type) for model_type in MODEL_TYPES}


@pytest.fixture(params=MODEL_TYPES)
def pair(request, pairs) -> Pair:
    """A pair of each model type, shared: a test that changes a model takes ``fresh_pair``."""
    return pairs[request.param]


@pytest.fixture(params=MODEL_TYPES)
def fresh_pair(request, pairs) -> Pair:
    """A pair of each model type that a test may change."""
    stock = copy.deepcopy(pairs[request.param].stock)
    return Pair(stock, replace_attention(copy.deepcopy(stock)))
