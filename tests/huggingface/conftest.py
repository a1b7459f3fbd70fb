"""Fixtures: a stock model beside a converted one with the same weights."""

import copy

import pytest

from compiled_dsa.huggingface import replace_attention
from tests.huggingface.tiny_models import ALL_MODEL_TYPES, MODEL_TYPES, Pair, make_pair


@pytest.fixture(scope="session")
def all_pairs() -> dict[str, Pair]:
    """One pair a model type, shared by all tests, which must leave them as they are."""
    return {model_type: make_pair(model_type) for model_type in ALL_MODEL_TYPES}


@pytest.fixture(scope="session")
def pairs(all_pairs) -> dict[str, Pair]:
    return {model_type: all_pairs[model_type] for model_type in MODEL_TYPES}


@pytest.fixture(params=MODEL_TYPES)
def pair(request, pairs) -> Pair:
    """A pair of each main model type, shared: a test that changes a model takes ``fresh_pair``."""
    return pairs[request.param]


@pytest.fixture(params=ALL_MODEL_TYPES)
def any_pair(request, all_pairs) -> Pair:
    """A pair of each model type, shared, for the tests that the relatives go through too."""
    return all_pairs[request.param]


@pytest.fixture(params=MODEL_TYPES)
def fresh_pair(request, pairs) -> Pair:
    """A pair of each main model type that a test may change."""
    return _fresh(pairs[request.param])


@pytest.fixture(params=ALL_MODEL_TYPES)
def any_fresh_pair(request, all_pairs) -> Pair:
    """A pair of each model type that a test may change."""
    return _fresh(all_pairs[request.param])


def _fresh(pair: Pair) -> Pair:
    stock = copy.deepcopy(pair.stock)
    return Pair(stock, replace_attention(copy.deepcopy(stock)))
