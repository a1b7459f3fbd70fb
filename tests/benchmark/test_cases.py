"""The cases of ``python -m compiled_dsa bench``, and the limits printed beside them."""

from dataclasses import replace

import pytest

from compiled_dsa import DSAConfig
from compiled_dsa.benchmark.cases import COMPOSITION, SIZES, case_limits, cases, layer_config, limits, selected, stages
from compiled_dsa.huggingface.small_models import model_config


@pytest.mark.parametrize("model", SIZES)
def test_sizes_are_those_of_transformers(model):
    assert layer_config(model) == DSAConfig.from_hf(model_config(model, 1))


def test_unknown_model():
    with pytest.raises(ValueError, match="model='gpt'; it must be one of deepseek_v32, glm_moe_dsa"):
        layer_config("gpt")


@pytest.mark.parametrize(
    ("batch", "context", "bytes_us", "stages_us"),
    [
        (1, 8192, 95, 96),
        (1, 65536, 97, 98),
        (16, 8192, 104, 112),
        (32, 32768, 138, 152),
        (64, 8192, 132, 160),
        (128, 8192, 168, 225),
        (128, 32768, 267, 324),
    ],
)
def test_floors_of_decode_at_the_sizes_of_deepseek_v32(batch, context, bytes_us, stages_us):
    """Against figures worked out by hand: 402 MB of weights, index keys and selected latents."""
    found = limits([layer_config("deepseek_v32")], "decode", batch, context, batch)
    assert found.bytes == pytest.approx(bytes_us, rel=0.03) and found.stages == pytest.approx(stages_us, rel=0.03)
    assert found.bytes <= found.limit <= found.stages


def test_floor_of_glm():
    assert limits([layer_config("glm_moe_dsa")], "decode", 1, 8192, 1).bytes == pytest.approx(83, rel=0.03)


@pytest.mark.parametrize("model", SIZES)
def test_pairs_of_a_prefill(model):
    """Counted one row at a time."""
    c, rows, context = layer_config(model), 3000, 4096
    pairs = scored = 0.0
    for visible in range(context - rows + 1, context + 1):
        sparse = visible > c.index_topk
        width = 2 * c.kv_lora_rank + c.qk_rope_head_dim if sparse else c.qk_head_dim + c.v_head_dim
        pairs += 2.0 * c.num_heads * min(visible, c.index_topk) * width
        scored += 2.0 * c.index_n_heads * c.index_head_dim * visible * sparse
    by_name = {stage.name: stage for stage in stages(c, "prefill", 1, context, rows)}
    assert by_name["attention"].bf16_flop == pairs and by_name["logits"].fp8_flop == scored


def test_a_layer_that_shares_has_no_indexer():
    c = layer_config("glm_moe_dsa")
    shared = stages(replace(c, index_shared=True), "decode", 1, 8192, 1)
    assert "logits" not in {stage.name for stage in shared}
    assert sum(s.moved for s in shared) < sum(s.moved for s in stages(c, "decode", 1, 8192, 1)) - 8192 * 132


@pytest.mark.parametrize("model", SIZES)
def test_cases_cover_what_is_asked_for_in_order_of_importance(model):
    names = [case.name.removeprefix(f"{model} ") for case in cases(model)]
    assert len(set(names)) == len(names)
    decode = {(case.batch, case.context) for case in cases(model) if case.level == "layer" and case.kind == "decode"}
    assert decode == {(1, 8192), (1, 65536), (16, 8192), (32, 32768), (64, 8192), (128, 8192), (128, 32768)}
    prefill = {(case.rows, case.context) for case in cases(model) if case.kind == "prefill"}
    assert prefill == {(4096, 4096), (8192, 8192), (4096, 32768), (4096, 131072)}
    assert names[0] == "layer decode B=1 ctx=8192" and names[-1].startswith("model decode")
    for case in cases(model):
        if any(peer.startswith("hf") for peer in case.peers) and case.level == "layer":
            assert case.context == 8192 and case.batch in (1, 16) or case.rows == case.context in (4096, 8192)
        assert case_limits(case).stages >= case_limits(case).bytes > 0


def test_selection():
    chosen = selected("deepseek_v32", "B=1 ctx=8192,prefill")
    assert {case.level for case in chosen} == {"layer", "model"} and len(chosen) == 6
    assert selected("deepseek_v32", "nothing") == []
    quick = selected("deepseek_v32", quick=True)
    assert [case.kind for case in quick] == ["decode", "prefill"]
    assert all("piecewise" not in case.modes and case.peers == (COMPOSITION, "hf_sdpa") for case in quick)
